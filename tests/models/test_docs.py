"""The examples of docs/masks.md run as printed."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / 'docs' / 'masks.md').read_text(encoding='utf-8')
EXAMPLES = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)


@pytest.mark.parametrize('index', [0, 1])
def test_example(index):
    assert len(EXAMPLES) == 2
    torch.manual_seed(0)
    names = {}
    exec(EXAMPLES[index], names)
    if index == 1:
        assert names['loss'].isfinite() and names['hidden'].any() and names['seen'].any()
        assert all(p.grad is None or p.grad.isfinite().all() for p in names['model'].parameters())
