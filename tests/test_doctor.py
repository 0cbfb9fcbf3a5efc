"""The doctor passes a sound installation and notices a broken one. No clock is asserted here."""

import itertools
import re

import pytest
import torch

from nprf_vit import doctor
from nprf_vit.diagnosis.device import Examination
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.ops import dispatch
from nprf_vit.ops.backends.fft import FFT_POINTS
from nprf_vit.ops.backends.interface import Case


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(doctor, 'time_backends', lambda *args: [])


def test_a_sound_installation(capsys):
    assert doctor.main(['--quick']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith('sound: every backend on cpu')
    assert any('FFT_POINT' in line for line in lines)
    for backend in ('direct', 'fft', 'linear', 'window', 'cells', 'step', 'auto'):
        assert any(line.startswith(f'  {backend:<8}ok') for line in lines)


def test_the_table_has_what_was_printed(tmp_path, capsys):
    assert doctor.main(['--quick', '--csv', str(tmp_path / 'doctor.csv')]) == 0
    rows, printed = read_rows(tmp_path / 'doctor.csv'), capsys.readouterr().out
    errors = {row['backend']: row for row in rows if row['quantity'].startswith('error')}
    assert list(errors) == ['direct', 'fft', 'linear', 'window', 'cells', 'step', 'auto']
    for row in errors.values():
        [said] = re.findall(rf'^  {row["backend"]} .* largest error (\S+) of the allowed', printed, re.MULTILINE)
        assert float(row['value']) == pytest.approx(float(said), rel=0.06)  # two digits
    times = [row for row in rows if row['quantity'] == 'seconds']
    assert {row['case'] for row in times} == {'8x8', '14x14', '20x20'} and len(times) == 3 * 6
    [point] = [float(row['value']) for row in rows if row['quantity'] == 'FFT_POINT']
    [said] = re.findall(r'FFT_POINT (\S+) measured here', printed)
    assert point == pytest.approx(float(said), abs=0.06)


def test_a_time_budget_leaves_out_the_largest_sizes_and_names_them(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(doctor.time, 'perf_counter', lambda: float(next(clock)))  # every look at it is a second later
    monkeypatch.setattr(doctor, 'median_seconds', lambda runs, *args: dict.fromkeys(runs, 1.0))
    args = ('cpu', ['direct', 'fft'], [8, 10, 80], 1)
    assert list(doctor.time_sizes(*args, seconds=1e6)) == [8, 10, 80]
    assert 'left out' not in capsys.readouterr().out
    assert list(doctor.time_sizes(*args, seconds=20)) == [8, 10]
    assert 'left out to stay within 20 seconds: 80x80' in capsys.readouterr().out
    assert list(doctor.time_sizes(*args, seconds=0.001)) == [8]
    with pytest.raises(SystemExit):
        doctor.main(['--seconds', '0'])


def test_a_table_without_a_folder_is_refused(capsys):
    with pytest.raises(SystemExit):
        doctor.main(['--csv', 'missing/doctor.csv'])
    assert 'there is no folder missing' in capsys.readouterr().err


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
    costs = dispatch.count(Case((48, 48), 32, 64))
    point = dispatch.fitted_fft_point((48, 48), 32, 64, fft_seconds=2 * costs['fft'], direct_seconds=costs['direct'])
    assert point == pytest.approx(2 * FFT_POINTS['cpu'])
    assert doctor.first_fft(FFT_POINTS['cpu']) < doctor.first_fft(point)


def test_a_step_that_changes_is_not_sound(untimed, capsys, monkeypatch):
    monkeypatch.setattr(doctor, 'examine', lambda backend, device: Examination(backend != 'window', None, None, None))
    assert doctor.main(['--quick']) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == 'NOT SOUND: window on cpu: two runs differ'
    assert 'memory, host reads and graph capture: on CUDA only' in printed


def test_times_on_cuda_are_held_against_the_fused_kernels(capsys, monkeypatch):
    """With times as a GPU might have them: the constant of the cost model for CUDA, and what to change."""
    costs = dispatch.count(Case((48, 48), doctor.TIMED_M, doctor.TIMED_D, device='cuda'))
    took = {
        'direct': 9.0,
        'window': 1.0,
        'linear': 1.0,
        'fused': 1.0,
        'sdpa': 1.0,
        'fft': costs['fft'] / costs['direct'],
    }
    for factor, changed in ((1.0, False), (1 / 8, True)):
        slower = took | {'fft': took['fft'] * factor, 'fused': 1.0 if factor == 1.0 else took['fft'] * factor * 0.8}
        expected = FFT_POINTS['cuda'] * slower['fft'] / slower['fused'] / took['fft']
        monkeypatch.setattr(doctor, 'time_sizes', lambda *args, slower=slower: {48: slower})
        findings = doctor.time_backends('cuda', ['direct', 'fused', 'fft'], [48], 1)
        [point] = [f.value for f in findings if f.quantity == 'FFT_POINT']
        assert point == pytest.approx(expected)
        assert {f.backend for f in findings if f.quantity == 'seconds'} == set(took)
        printed = capsys.readouterr().out
        assert 'fused is behind fft from' in printed and ('to change: FFT_POINTS' in printed) is changed


def test_on_cuda_an_fft_is_far_behind():
    """The roofline's constant: `fused` is ahead up to 10⁵ tokens and more."""
    assert 400**2 > 1e5 and doctor.first_fft(FFT_POINTS['cuda'], 'cuda') > 400
