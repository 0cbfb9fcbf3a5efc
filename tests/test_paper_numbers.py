"""The paper's numbers stand in nprf_vit/engine/output/paper_results.py alone; every quotation is held to it."""

import re
from pathlib import Path

import pytest

from nprf_vit.engine.output.paper_results import (
    PAPER,
    PAPER_BITS,
    PAPER_BLEU,
    PAPER_GLUE,
    PAPER_OTHER_BITS,
    PAPER_PERPLEXITY,
)

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r'<!-- table \w+ -->.*?<!-- end -->', re.S)
NPRF, NORPE, PRF, SOFTMAX = ('nprf_deit_base', 'nprf_deit_base_norpe', 'prf_deit_base', 'softmax_deit_base')
TOP1 = {name: str(row[0]) for name, row in PAPER.items()}
BOTH = {name: f'{row[0]} / {row[1]}' for name, row in PAPER.items()}
HEADER = {name: f'{row[0]} top-1 / {row[1]} top-5' for name, row in PAPER.items()}
BITS = {name.split('_')[0]: str(bits) for name, bits in PAPER_BITS.items()}
OTHERS = [f'{name} {bits}' for name, bits in PAPER_OTHER_BITS.items()]
NUMBERS = {str(n) for row in PAPER.values() for n in row[:2]}
NUMBERS |= {str(n) for n in (*PAPER_BITS.values(), *PAPER_OTHER_BITS.values())}

WORDS, BLEU, GLUE = PAPER_PERPLEXITY, PAPER_BLEU, PAPER_GLUE['nprf_bias']
PERPLEXITIES = (
    f'NPRF with bias {WORDS["nprf_bias"]}, softmax {WORDS["softmax"]}, TRF {WORDS["trf"]}, linear elu {WORDS["elu"]}'
)
BLEUS = (
    f'standard {BLEU["standard"]}, standard encoder with PRF decoder {BLEU["standard_prf"]}, PRF {BLEU["prf"]}, '
    f'NPRF with bias {BLEU["nprf_bias"]}'
)

# by file, each quotation with as many words around it as tell which number it is
QUOTATIONS = {
    'README.md': [
        f'softmax {TOP1[SOFTMAX]}, NPRF with bias {TOP1[NPRF]}, PRF {TOP1[PRF]}, NPRF {TOP1[NORPE]} |',
        f'NPRF with bias {BITS["nprf"]}, PRF {BITS["prf"]} bits/dim',
        *(f'| {kernel} | {BOTH[name]}' for name, kernel in ((NPRF, 'shared'), (SOFTMAX, 'softmax | none'))),
        *(f'| {kernel} | none | {BOTH[name]}' for name, kernel in ((NORPE, 'prf, normalized'), (PRF, 'prf'))),
    ],
    'docs/reproduce.md': [
        f'| NPRF DeiT-base w/ RPE | {BOTH[NPRF]} |',
        f'| the same, learning rate read literally | {BOTH[NPRF]} |',
        f'| NPRF DeiT-base w/o RPE | {BOTH[NORPE]} |',
        f'| PRF DeiT-base, fine-tuned from DeiT | {BOTH[PRF]} |',
        f'| DeiT-base (softmax) | {BOTH[SOFTMAX]} |',
    ],
    'docs/results.md': [
        f"The paper's order is softmax {TOP1[SOFTMAX]}, NPRF with bias {TOP1[NPRF]}, PRF {TOP1[PRF]} (fine-tuned), "
        f'NPRF without bias {TOP1[NORPE]}.',
        f'NPRF with a bias at {BITS["nprf"]} and PRF at {BITS["prf"]} bits/dim on ImageNet32',
        f'The paper has {PERPLEXITIES} on WikiText-103',
        f'The paper has {BLEUS} on IWSLT14 de-en',
    ],
    'docs/language.md': [
        f'WikiText-103, test perplexity | {PERPLEXITIES} |',
        f'BLEU | {BLEUS} |',
        f'average over GLUE | NPRF with bias {GLUE} |',
    ],
    'examples/language/language_model.py': [f'(test perplexity): {PERPLEXITIES}. Not run here.'],
    'examples/language/translation.py': [
        f'softmax ("standard") {BLEU["standard"]}, standard encoder with PRF decoder {BLEU["standard_prf"]}, '
        f'PRF in both {BLEU["prf"]}, NPRF with bias in both {BLEU["nprf_bias"]}. Not run here.'
    ],
    'examples/language/masked_language_model.py': [f'NPRF with bias {GLUE}. Not run here.'],
    'docs/pixel.md': [
        f'19.5 M | {BITS["nprf"]} |',
        f'21.0 M | {BITS["prf"]} |',
        f'{", ".join(OTHERS[:-1])} and {OTHERS[-1]}.',
    ],
    'configs/imagenet1k/nprf_deit_base.yaml': [f'row "NPRF DeiT-base w/ RPE": target {HEADER[NPRF]}'],
    'configs/imagenet1k/nprf_deit_base_literal_lr.yaml': [f'row "NPRF DeiT-base w/ RPE" ({HEADER[NPRF]})'],
    'configs/imagenet1k/nprf_deit_base_norpe.yaml': [f'row "NPRF DeiT-base w/o RPE": target {HEADER[NORPE]}'],
    'configs/imagenet1k/prf_deit_base.yaml': [f'row "PRF DeiT-base", fine-tuned from DeiT: target {HEADER[PRF]}'],
    'configs/imagenet1k/softmax_deit_base.yaml': [f'row "DeiT-base": target {HEADER[SOFTMAX]}'],
    'configs/imagenet32/nprf_pixel_imagenet32.yaml': [
        f'NPRF attention and a relative position bias: {BITS["nprf"]} bits/dim in the paper'
    ],
    'configs/imagenet32/prf_pixel_imagenet32.yaml': [f'PRF attention and no bias: {BITS["prf"]} bits/dim in the paper'],
    'nprf_vit/models/nprf_deit.py': [
        f'normalized PRF attention and a shared 2-D relative position bias: {BOTH[NPRF]} in the paper',
        f'normalized PRF attention and absolute positions: {BOTH[NORPE]} in the paper',
        f'DeiT-base with PRF attention and absolute positions: {BOTH[PRF]} in the paper, fine-tuned from DeiT',
        f'softmax attention, pooled instead of a class token: {BOTH[SOFTMAX]} in the paper',
    ],
    'nprf_vit/models/pixel.py': [
        f'shared 1-D relative position bias: {BITS["nprf"]} bits/dim in the paper',
        f'PRF attention and absolute positions: {BITS["prf"]} bits/dim in the paper',
    ],
}


def files() -> list[str]:
    """Where the paper may be quoted: documents, configs, the package's own code but for the one file."""
    patterns = (
        'README.md',
        'CONTRIBUTING.md',
        'docs/*.md',
        'configs/**/*.yaml',
        'nprf_vit/**/*.py',
        'examples/**/*.py',
    )
    found = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(found - {'nprf_vit/engine/output/paper_results.py'})


def read(name: str) -> str:
    return ' '.join(GENERATED.sub('', (ROOT / name).read_text(encoding='utf-8')).split())


def complaints(text: str, quotations: list[str]) -> list[str]:
    """Quotations that do not stand once in the text, and numbers of the paper that stand outside of them."""
    missing = [phrase for phrase in quotations if text.count(phrase) != 1]
    for phrase in quotations:
        text = text.replace(phrase, ' ')
    return missing + [n for n in re.findall(r'(?<![\d.])\d+\.\d+(?![\d.]*\d)', text) if n in NUMBERS]


def test_every_quotation_is_in_a_file_that_is_looked_at():
    assert set(QUOTATIONS) <= set(files())


@pytest.mark.parametrize('name', QUOTATIONS)
def test_quotations_are_the_papers(name):
    assert complaints(read(name), QUOTATIONS[name]) == []


def test_nobody_else_quotes_the_paper():
    elsewhere = {name: complaints(read(name), []) for name in files() if name not in QUOTATIONS}
    assert {name: numbers for name, numbers in elsewhere.items() if numbers} == {}


def test_a_wrong_and_an_unlisted_number_are_noticed():
    text, quotations = read('docs/reproduce.md'), QUOTATIONS['docs/reproduce.md']
    assert complaints(text.replace('77.7 / 93.3', '77.9 / 93.3'), quotations) == [quotations[2], '93.3']
    assert complaints(f'{text} DeiT has 81.2.', quotations) == ['81.2']
