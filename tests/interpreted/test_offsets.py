"""Offsets beyond 2³¹ elements: in memory that is mapped, not allocated, and on the numbers themselves."""

import pytest
import torch
import triton
import triton.language as tl

from nprf_vit.ops.attention import packed_attention
from nprf_vit.ops.backends.fused_qkv import BACKEND
from nprf_vit.ops.bias import Bias
from nprf_vit.ops.features import draw_projection
from nprf_vit.ops.kernels.launch import is_long
from nprf_vit.ops.kernels.tiles import token_offsets

SHAPE = 2, 3, 3, 2, 16  # B, N, 3, K, D
# batch, token, part, head: products that pass 2³¹ by items, by tokens, and by parts and heads
STRIDES = {
    'items': (2**31 + 64, 96, 32, 16),
    'tokens': (96, 2**30 + 192, 32, 16),
    'parts': (96, 192, 2**30 + 768, 16),
    'heads': (96, 192, 32, 2**31 + 768),
}


@pytest.mark.parametrize('name', STRIDES)
def test_packed_projection_in_memory_of_gigabytes(name, tmp_path):
    """A file with holes: only the pages that are touched exist. The same bits as from a compact copy."""
    strides = (*STRIDES[name], 1)
    size = sum((n - 1) * s for n, s in zip(SHAPE, strides)) + 1
    assert size > 2**31
    with (tmp_path / 'holes').open('wb') as file:
        file.truncate(4 * size)
    memory = torch.from_file(str(tmp_path / 'holes'), shared=True, size=size, dtype=torch.float32)
    qkv = memory.as_strided(SHAPE, strides)
    qkv.copy_(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    assert is_long(qkv.permute(2, 0, 3, 1, 4)[0]) == (name == 'tokens')
    w, table = draw_projection(2, 8, 16), torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    results = []
    for x in (qkv.clone(memory_format=torch.contiguous_format), qkv):
        leaf, bias = x.detach().requires_grad_(), table.clone().requires_grad_()
        z = packed_attention(BACKEND.run, leaf, w, Bias(bias))
        results.append((z, *torch.autograd.grad(z.square().sum(), (leaf, bias))))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@triton.jit
def write_offsets(out, stride, LONG: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(out + i, token_offsets(i, stride, LONG).to(tl.int64))


def test_the_offsets_themselves():
    """In 32 bits the products wrap around; LONG makes them 64."""
    expected = torch.arange(16) * 2**30
    out = torch.zeros(16, dtype=torch.int64)
    write_offsets[(1,)](out, 2**30, LONG=True)
    assert torch.equal(out, expected)
    write_offsets[(1,)](out, 2**30, LONG=False)
    assert not torch.equal(out, expected)
