"""The experiments run small, continue where they were stopped, and draw their pictures."""

import pytest

from experiments import ablations, bits_per_dim, conversion, ordering, resolution, runs, stability
from nprf_vit.engine import curves
from nprf_vit.engine.output import read_rows

EXPERIMENTS = {
    'ordering': (ordering, {'SEEDS': 1, 'FACTOR_SEEDS': 1}),
    'conversion': (conversion, {}),
    'ablations': (ablations, {'SEEDS': 1}),
    'stability': (stability, {'SEEDS': 1, 'RATES': ('1e-3', '1e0')}),
    'bits_per_dim': (bits_per_dim, {'SEEDS': 1}),
    'resolution': (resolution, {}),
}


def run(name, folder, *args):
    module = EXPERIMENTS[name][0]
    options = ['--quick', '--work', str(folder / 'runs'), '--output', str(folder), *args]
    return runs.main(module.__doc__, module.experiment, options)


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_quick_run_writes_a_table_and_a_picture_and_repeats_nothing(name, tmp_path, capsys, monkeypatch):
    module, smaller = EXPERIMENTS[name]
    monkeypatch.setattr(curves, 'available', False)  # the runs' own pictures would take most of the time
    for constant, value in smaller.items():
        monkeypatch.setattr(module, constant, value)
    assert run(name, tmp_path) == 0
    rows = read_rows(tmp_path / f'{name}.csv')
    assert rows and (tmp_path / f'{name}.png').stat().st_size > 10_000
    assert '|---|' in capsys.readouterr().out
    monkeypatch.setattr(runs, 'train', None)  # nothing is left to train
    assert run(name, tmp_path) == 0
    assert read_rows(tmp_path / f'{name}.csv') == rows


def test_a_run_out_of_time_is_continued(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ablations, 'CASES', [('prf', 8)])
    monkeypatch.setattr(ablations, 'BASES', {'nprf_bias': 'bias'})
    monkeypatch.setattr(ablations, 'plot', lambda table, path: None)
    assert run('ablations', tmp_path, '--minutes', '-1') == runs.UNFINISHED
    assert 'the same command continues' in capsys.readouterr().err
    monkeypatch.setattr(runs, 'passed', lambda deadline: (tmp_path / 'runs/nprf_bias_prf_8-0/steps.csv').is_file())
    assert run('ablations', tmp_path) == runs.UNFINISHED  # each run stops after its first step
    monkeypatch.setattr(runs, 'passed', lambda deadline: False)
    assert run('ablations', tmp_path) == 0
    assert [row['steps'] for row in read_rows(tmp_path / 'ablations.csv')] == ['6', '6']
    assert 'continuing after step 1' in (tmp_path / 'runs/nprf_bias_prf_8-0/log.txt').read_text()


def test_experiments_share_their_common_runs():
    for base in ablations.BASES:
        ours, theirs = ablations.ablation(base, 'prf', 32)[0], ordering.runs(base, 1)[0]
        assert ours == theirs == resolution.trained_runs(base)[0]


def test_commands_say_what_is_set():
    command = resolution.trained_runs('deit')[0].command()
    assert command.startswith('python train.py --config configs/fashion_12px.yaml --data-dir DIR --set model=deit_tiny')
    assert "'model_kwargs={patch_size: 2, embed_dim: 64" in command and command.endswith('seed=0')
