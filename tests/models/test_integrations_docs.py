"""The examples of docs/integrations.md run as printed, and its table names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'integrations.md').read_text(encoding='utf-8')
EXAMPLES = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)


def test_torch_func():
    assert len(EXAMPLES) == 2
    exec(EXAMPLES[0], names := {})
    assert all(g.shape[0] == 3 and g.isfinite().all() for g in names['per_sample'].values())


@pytest.mark.slow
def test_fvcore():
    pytest.importorskip('fvcore', reason='in the extra clients')
    exec(EXAMPLES[1], names := {})
    assert names['count'].total() == pytest.approx(1.23e9, rel=0.02)


def test_every_client_of_the_folder_is_in_the_table():
    files = {f'tests/clients/{path.name}' for path in (ROOT / 'tests' / 'clients').glob('test_*.py')}
    assert files <= set(re.findall(r'tests/[\w/]+\.py', PAGE))
    ours = re.findall(r'tests/(?:clients|examples|models|ops)/\w+\.py', PAGE)
    assert len(ours) > 10 and all((ROOT / file).exists() for file in ours)
