"""Softmax attention in bfloat16 while training on a CPU, where it goes without torch's fused attention."""

import pytest
import torch

from nprf_vit.layers import softmax_attention as module
from nprf_vit.layers.softmax_attention import softmax_attention
from nprf_vit.ops.bias import DenseBias

HEADS, TOKENS, DIM = 2, 9, 8


def tensors(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries and keys long enough that scores rounded to bfloat16 would show, values, and a bias."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, HEADS, TOKENS, DIM).mul(size).to(dtype) for size in (4, 4, 1))
    return [x.requires_grad_() for x in (q, k, v)], torch.randn(HEADS, TOKENS, TOKENS).to(dtype).requires_grad_()


def oracle(
    inputs: list[torch.Tensor], bias: torch.Tensor | None, causal: bool, key_mask: torch.Tensor | None
) -> torch.Tensor:
    q, k, v = (x.double() for x in inputs)
    scores = q @ k.mT * DIM**-0.5
    if bias is not None:
        scores = scores + bias.double()
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else torch.zeros(1, 1, dtype=torch.bool)
    hidden = hidden[None, None] if key_mask is None else hidden[None, None] | ~key_mask[:, None, None]
    weights = scores.masked_fill(hidden, float('-inf')).softmax(-1)
    return weights.nan_to_num(0.0) @ v  # a query that sees no key gets zeros


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the queries that were attended to without torch's fused attention."""
    seen = []

    def spy(q, *args, **kwargs):
        seen.append(q.shape)
        return original(q, *args, **kwargs)

    original = module.plain_attention
    monkeypatch.setattr(module, 'plain_attention', spy)
    return seen


@pytest.mark.parametrize('biased', (False, True))
@pytest.mark.parametrize('causal', (False, True))
@pytest.mark.parametrize('masked', (False, True))
def test_output_and_gradients_match_the_oracle(plain, biased, causal, masked):
    inputs, bias = tensors(torch.bfloat16)
    key_mask = None
    if masked:
        key_mask = torch.ones(3, TOKENS, dtype=torch.bool)
        key_mask[0, 5:] = False
        key_mask[1] = False
    leaves = [*inputs, bias] if biased else inputs
    z = softmax_attention(*inputs, DenseBias(bias) if biased else None, causal, key_mask)
    assert plain and z.dtype == torch.bfloat16
    weight = torch.randn(z.shape, dtype=torch.float64)
    got = torch.autograd.grad((z.double() * weight).sum(), leaves)
    expected = oracle(inputs, bias if biased else None, causal, key_mask)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    allowed = 4 * torch.finfo(torch.bfloat16).eps
    for have, want in zip((z, *got), (expected, *wanted)):
        assert (have.double() - want.double()).abs().max() <= allowed * want.double().abs().max()


def test_autocast_does_not_round_the_scores(plain):
    inputs, _ = tensors(torch.bfloat16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        z = softmax_attention(*inputs)
    assert plain and z.dtype == torch.bfloat16
    assert torch.equal(z, softmax_attention(*inputs))


def test_inference_other_dtypes_and_long_sequences_take_torch_s_attention(plain, monkeypatch):
    inputs, _ = tensors(torch.bfloat16)
    with torch.no_grad():
        softmax_attention(*inputs)
    softmax_attention(*(x.detach() for x in inputs))
    for dtype in (torch.float32, torch.float16):
        softmax_attention(*tensors(dtype)[0])
    monkeypatch.setattr(module, 'PLAIN_SCORES', 3 * HEADS * TOKENS**2 - 1)
    softmax_attention(*inputs)
    assert not plain


def test_scale_and_dropout_are_those_of_torch(plain):
    inputs, _ = tensors(torch.bfloat16)
    z = softmax_attention(*inputs, scale=0.1)
    q, k, v = (x.double() for x in inputs)
    assert (z.double() - (q @ k.mT * 0.1).softmax(-1) @ v).abs().max() < 0.02
    assert softmax_attention(*inputs, dropout_p=1.0).eq(0).all()
    assert len(plain) == 2
