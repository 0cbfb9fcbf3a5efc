"""The examples of docs/export.md run as printed."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / 'docs' / 'export.md').read_text(encoding='utf-8')
EXAMPLES = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
MODEL, PROGRAM = 0, 1
OF_CLIENT = {
    'export': (MODEL, PROGRAM, 2),
    'aoti': (MODEL, PROGRAM, 3),
    'trace': (MODEL, 4),
    'onnx': (MODEL, PROGRAM, 5),
    'openvino': (MODEL, PROGRAM, 6),
}


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@pytest.mark.parametrize(
    'client', ['export', 'trace', *(pytest.param(c, marks=pytest.mark.slow) for c in ('aoti', 'onnx', 'openvino'))]
)
def test_example(client, tmp_path, monkeypatch):
    """The model, its program if needed, and what one client does with it."""
    if client == 'openvino':
        pytest.importorskip('openvino', reason='in the extra clients')
    assert len(EXAMPLES) == 7
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.no_grad():
        for example in OF_CLIENT[client]:
            exec(EXAMPLES[example], names)
    assert names['logits'].shape[1] == 10 and names['logits'].shape[0] in (1, 5)
