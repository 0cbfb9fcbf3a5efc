"""The doctor passes a sound installation and notices a broken one. No clock is asserted here."""

import pytest
import torch

from nprf_vit import doctor
from nprf_vit.ops import cost


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(doctor, 'time_backends', lambda *args: None)


def test_a_sound_installation(capsys):
    assert doctor.main(['--quick']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith('sound: every backend on cpu')
    assert any('FFT_POINT' in line for line in lines)
    for backend in ('direct', 'fft', 'linear', 'window', 'step', 'auto'):
        assert any(line.startswith(f'  {backend:<8}ok') for line in lines)


def flipped(phi_q, phi_k, v, bias=None, *args, _real=doctor.kernel_attention, **kwargs):
    return _real(phi_q, phi_k, v, None if bias is None else bias.flip(-1), *args, **kwargs)


def test_a_flipped_table_is_not_sound(untimed, capsys, monkeypatch):
    monkeypatch.setattr(doctor, 'kernel_attention', flipped)
    assert doctor.main(['--quick']) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith('NOT SOUND: direct on cpu is off by')
    assert 'linear' not in last  # it has no table


def test_a_wrong_gradient_is_not_sound(untimed, capsys, monkeypatch):
    def halved(*args, _real=doctor.kernel_attention, **kwargs):
        z = _real(*args, **kwargs)
        return z.detach() / 2 + z / 2 if z.requires_grad else z

    monkeypatch.setattr(doctor, 'kernel_attention', halved)
    assert doctor.main(['--quick']) == 1
    assert 'fft on cpu is off by' in capsys.readouterr().out


def test_a_backend_that_raises_is_told_by_name(untimed, capsys, monkeypatch):
    def broken(*args, backend, _real=doctor.kernel_attention, **kwargs):
        if backend == 'window':
            raise OSError('libfft.so: cannot open\nmore')
        return _real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(doctor, 'kernel_attention', broken)
    assert doctor.main(['--quick']) == 1
    assert capsys.readouterr().out.splitlines()[-1] == 'NOT SOUND: window on cpu: OSError: libfft.so: cannot open'


def test_not_a_number_is_not_sound(monkeypatch):
    def poisoned(*args, _real=doctor.kernel_attention, **kwargs):
        z = _real(*args, **kwargs)
        z.register_hook(lambda grad: grad * torch.nan)
        return z

    monkeypatch.setattr(doctor, 'kernel_attention', poisoned)
    assert doctor.relative_error(doctor.CASES[0], 'direct', torch.float64, 'cpu') > 1
    monkeypatch.setattr(doctor, 'kernel_attention', lambda phi_q, phi_k, v, *args, **kwargs: v * torch.nan)
    assert doctor.relative_error(doctor.CASES[0], 'step', torch.float64, 'cpu') > 1


def test_the_fitted_constant_reproduces_the_model():
    costs = cost.count((48, 48), 32, 64)
    point = cost.fitted_fft_point((48, 48), 32, 64, fft_seconds=2 * costs['fft'], direct_seconds=costs['direct'])
    assert point == pytest.approx(2 * cost.FFT_POINT)
    assert doctor.first_fft(cost.FFT_POINT) < doctor.first_fft(point)
