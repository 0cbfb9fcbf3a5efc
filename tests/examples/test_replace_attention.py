"""The hand-written ViT: three models that differ in their attention alone."""

import pytest
import torch

pytest.importorskip('sklearn')
from examples.replace_attention import DIM, HEADS, MODELS, SoftmaxAttention, ViT, main
from nprf_vit import KernelAttention


def test_they_differ_in_attention_and_positions_alone():
    names = {}
    for name, arguments in MODELS.items():
        model = ViT(*arguments)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
        names[name] = {key for key in model.state_dict() if not key.endswith(('attn.w', 'rel_pos_bias.table'))}
    softmax, kernelized, biased = names.values()
    assert softmax == kernelized == biased | {'pos'}


def test_its_softmax_is_ours():
    """The hand-written attention is the one that the kernels approximate; the weights load by name."""
    written = SoftmaxAttention(DIM, HEADS)
    ours = KernelAttention(DIM, HEADS, kernel='softmax', normalize=False)
    ours.load_state_dict(written.state_dict())
    x = torch.randn(2, 16, DIM)
    torch.testing.assert_close(written(x), ours(x), atol=1e-5, rtol=1e-4)


def test_it_runs(capsys):
    assert set(main(['--epochs', '1', '--images', '64'])) == set(MODELS)
    assert 'relative position bias' in capsys.readouterr().out


@pytest.mark.slow
def test_in_full():
    softmax, _, biased = main([]).values()
    assert biased > 95 and biased > softmax - 1
