"""Kernels compile for GPUs that are not here, without spilling."""

import json

import pytest
import torch

triton = pytest.importorskip('triton')

from nprf_vit import doctor  # noqa: E402
from nprf_vit.ops.kernels import report, variants  # noqa: E402
from nprf_vit.ops.kernels.compile import compile_launch  # noqa: E402
from nprf_vit.ops.kernels.variants import Variant  # noqa: E402

TRITON = tuple(int(part) for part in triton.__version__.split('.')[:2])
# PyTorch's pytest settings turn this into noise: it is about Triton 3.10
pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.mark.parametrize('target', ['sm_80', 'sm_90'])
@pytest.mark.parametrize('variant', [*variants.FEW, Variant('full', torch.float16, 32, 64)], ids=str)
def test_a_handful(variant, target):
    """The paper's layer under autocast and a window in float32: forward, and the gradient of the values."""
    launches = [x for part in variants.launches_of(variant) for x in part]
    chosen = [x for x in launches if x.kernel.__name__ in ('attention_forward', 'value_gradient')]
    assert len(chosen) == 2
    for launch in chosen:
        compiled = compile_launch(launch, target)
        assert compiled.tensor_cores
        if TRITON >= (3, 9):  # what the tiles were chosen with; 3.4 spills 32 bytes of a window in float32
            assert compiled.spill_bytes == 0
        assert 32 <= compiled.registers <= 255 and 0 < compiled.shared_bytes <= 99 << 10


def test_a_spill_is_a_fault():
    row = {'kernel': 'k', 'target': 'sm_80', 'variant': 'v', 'registers': 255, 'spill_bytes': 0, 'shared_bytes': 1}
    assert report.faults([row]) == []
    assert 'spills 8' in report.faults([row | {'spill_bytes': 8}])[0]
    assert report.faults([row | {'spill_bytes': 8, 'target': 'gfx942'}]) == []
    assert 'shared memory' in report.faults([row | {'shared_bytes': 200 << 10}])[0]
    assert 'does not compile' in report.faults([row | {'error': 'e'}])[0]


def test_a_tile_that_is_too_large_spills():
    """The check can fail: 64 keys for 64 queries in float32, on 2 warps."""
    launches = [x for part in variants.launches_of(variants.FEW[1]) for x in part]
    (launch,) = [x for x in launches if x.kernel.__name__ == 'value_gradient']
    wide = launch._replace(num_warps=2)
    assert compile_launch(wide, 'sm_80').spill_bytes > 0


def test_doctor_refuses_unknown_targets(capsys):
    with pytest.raises(SystemExit):
        doctor.main(['--targets', 'sm_12'])
    assert 'sm_12' in capsys.readouterr().err


@pytest.mark.slow
def test_all_variants_on_all_targets(tmp_path):
    path = tmp_path / 'rows.json'
    assert doctor.main(['--targets', 'sm_80,sm_90,sm_100,gfx942', '--json', str(path)]) == 0
    rows = json.loads(path.read_text())
    for row in rows:
        assert {'kernel', 'target', 'registers', 'spill_bytes', 'shared_bytes', 'tensor_cores'} <= row.keys(), row
    assert {row['target'] for row in rows} == {'sm_80', 'sm_90', 'sm_100', 'gfx942'}
    for dtype in ('float32', 'bfloat16', 'float16'):
        assert any(dtype in row['variant'] for row in rows)
