"""The check on first use, run for real in the interpreter, and what happens where it fails."""

import warnings

import pytest
import torch

from nprf_vit.ops import kernel_attention
from nprf_vit.ops.backends import fused_check
from nprf_vit.ops.kernels import launch, launch_forward
from nprf_vit.ops.kernels.launch import Problem

from .cases import assert_right, make, run
from .tensor_cores import emulate

KINDS = {
    'full': Problem((5, 7), 'full', (4, 6), False, True, 'ieee', 0),
    'window': Problem((5, 7), 'window', (1, 2), False, True, 'ieee', 1),
    'causal': Problem((1, 35), 'full', (0, 34), True, True, 'ieee', 0),
    'none': Problem((5, 7), 'none', (0, 0), False, True, 'ieee', 1),
}


class Values:
    """Stands in for values on a GPU, so that the check is asked for; it then runs on the CPU."""

    is_cuda, device, dtype, shape = True, torch.device('cpu'), torch.float32, (1, 1, 35, 16)


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.delenv('NPRF_VIT_FUSED', raising=False)
    monkeypatch.setattr(fused_check, '_verdicts', {})
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)


@pytest.mark.parametrize('precision', ['tf32x3', 'tf32'])
@pytest.mark.parametrize('kind', ['full', *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != 'full')])
def test_sound_kernels_are_trusted(kind, precision, unchecked, monkeypatch):
    """With the roundings of tensor cores, half-precision values beside TF32."""
    emulate(monkeypatch, precision)
    dtypes = (torch.float32,) if precision == 'tf32x3' else (torch.float32, torch.bfloat16, torch.float16)
    problem = KINDS[kind]._replace(precision=precision)
    for dtype in dtypes:
        assert fused_check.find_fault(torch.device('cpu'), dtype, 8, 16, problem) is None


def test_a_wrong_kernel_is_told_once(unchecked, monkeypatch):
    real = launch_forward.run_forward

    def wrong(*args):
        out = real(*args)
        out.z.mul_(1.01)
        return out

    monkeypatch.setattr(launch_forward, 'run_forward', wrong)
    with pytest.warns(UserWarning, match='z is off by 0.0.*Plain PyTorch runs instead.*GPU report') as caught:
        assert not fused_check.is_trusted(Values, 8, KINDS['full'])
    assert [w.category for w in caught].count(UserWarning) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not fused_check.is_trusted(Values, 8, KINDS['full'])


def test_a_launch_that_fails_is_told(unchecked, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError('no kernel image is available')

    monkeypatch.setattr(launch_forward, 'launch', fail)
    with pytest.warns(UserWarning, match='no kernel image is available'):
        assert not fused_check.is_trusted(Values, 8, KINDS['full'])


@pytest.mark.parametrize('name', ['grid', 'window'])
def test_without_trust_plain_pytorch_computes_the_same(name, monkeypatch):
    """NPRF_VIT_FUSED=0: no kernel is launched, forward or backward."""
    grid = {'grid_size': (5, 4)}
    tensors = make((5, 4), batch=1, window=(3, 3) if name == 'window' else None)
    with launch.recorded() as launches:
        monkeypatch.setenv('NPRF_VIT_FUSED', '0')
        result = run(tensors, **grid)
    assert launches == []
    assert_right(tensors, result=result, **grid)


def test_with_the_override_nothing_is_checked(unchecked, monkeypatch):
    monkeypatch.setenv('NPRF_VIT_FUSED', '1')
    monkeypatch.setattr(fused_check, 'find_fault', lambda *args: pytest.fail('checked'))
    assert fused_check.is_trusted(Values, 8, KINDS['full'])
    tensors = make((2, 2), batch=1)
    assert kernel_attention(**tensors, grid_size=(2, 2), backend='fused').isfinite().all()
