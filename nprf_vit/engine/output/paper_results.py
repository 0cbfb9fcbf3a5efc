"""The paper's numbers (Luo et al., NeurIPS 2021), beside which ours are printed: ImageNet-1K, and others below.

Documents, configs and docstrings quote them; tests/test_paper_numbers.py holds every quotation to this file.
"""

PAPER = {  # model: (top-1, top-5, the row's name)
    'nprf_deit_base': (80.9, 94.8, 'NPRF DeiT-base w/ RPE'),
    'nprf_deit_base_norpe': (77.7, 93.3, 'NPRF DeiT-base w/o RPE'),
    'prf_deit_base': (79.5, 94.1, 'PRF DeiT-base, fine-tuned'),
    'softmax_deit_base': (81.2, 95.0, 'DeiT-base'),
    'deit_base_patch16_224': (81.2, 95.0, 'DeiT-base'),
}


def paper_row(model: str, num_classes: int | None) -> tuple[float, float, str] | None:
    """The row of this model, if what is measured can be ImageNet-1K."""
    return PAPER.get(model.split('.')[0]) if num_classes in (None, 1000) else None


# ImageNet32 in bits/dim; the paper does not say which version of the data, so it stands beside neither as equal
PAPER_BITS = {'nprf_pixel_imagenet32': 3.68, 'prf_pixel_imagenet32': 4.04}
# other people's models in the same table
PAPER_OTHER_BITS = {'ScoreFlow': 3.76, 'VDM': 3.72, 'DenseFlow': 3.63, 'Image Transformer': 3.77}
# its language tasks (docs/language.md), by the variants of examples/language: test perplexity on WikiText-103, BLEU on
# IWSLT14 de-en, average on GLUE
PAPER_PERPLEXITY = {'nprf_bias': 30.6, 'softmax': 33.0, 'trf': 33.6, 'elu': 38.4}
PAPER_BLEU = {'standard': 36.0, 'standard_prf': 36.2, 'prf': 34.0, 'nprf_bias': 36.0}
PAPER_GLUE = {'nprf_bias': 85.2}


def paper_bits(model: str, dataset: str) -> float | None:
    """The paper's bits/dim of this model, if what is measured is a version of ImageNet32."""
    return PAPER_BITS.get(model.split('.')[0]) if dataset.startswith('imagenet32') else None
