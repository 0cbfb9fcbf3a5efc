"""The examples of docs/layer.md run as printed."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / 'docs' / 'layer.md').read_text()
EXAMPLES = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize('index', [0, 1, 2, 3, 4])
def test_example(index):
    names = {}
    exec(EXAMPLES[index], names)
    if index == 0:
        assert names['out'].shape == (1, 56, 56, 96)
        block = names['Block'](16, 2, grid_size=(4, 4))
        out = block(torch.randn(2, 6, 3, 16))
        out.sum().backward()
        assert out.shape == (2, 6, 3, 16)
        assert block.attn.rel_pos_bias.table.grad.abs().sum() > 0
        windows = block.attn(torch.randn(10, 16, 16))
        assert windows.shape == (10, 16, 16)
    elif index == 2:
        assert names['out'].shape == (2, 197, 96) and names['wide'].shape == (2, 321, 96)
    elif index == 1:
        assert names['x'].shape == (2, 14, 14, 96) and names['x'].isfinite().all()
        assert names['bias'].table.shape == (3, 27, 27)
