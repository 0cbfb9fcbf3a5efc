"""The experiments run small, begin anew unless told to continue, say what they took over, and draw their pictures."""

import struct

import numpy as np
import pytest
import torch

from benchmarks import report
from experiments import (
    ablations,
    bias_ablation,
    bits_per_dim,
    command,
    conversion,
    feature_dim,
    high_resolution,
    image_table,
    ordering,
    runs,
    stability,
)
from nprf_vit.engine.model import build_model
from nprf_vit.engine.output import curves
from nprf_vit.engine.output.csv_file import read_rows

EXPERIMENTS = {
    'ordering': (ordering, {'SEEDS': 1, 'FACTOR_SEEDS': 1}),
    'conversion': (conversion, {}),
    'ablations': (ablations, {'SEEDS': 1}),
    'stability': (stability, {'SEEDS': 1, 'RATES': ('1e-3', '1e0')}),
    'bits_per_dim': (bits_per_dim, {'SEEDS': 1}),
    'high_resolution': (high_resolution, {}),
    'image_table': (image_table, {'SEEDS': 1, 'RATES': ('3e-3', '9e-3')}),
    'bias_ablation': (bias_ablation, {'SHORT_SEEDS': 1, 'LONG_SEEDS': {}, 'LONGEST_OPTIONS': ('nprf_start',)}),
    'feature_dim': (feature_dim, {'SEEDS': dict.fromkeys(feature_dim.FEATURES, 1)}),
}
ON_CIFAR = ('high_resolution', 'image_table', 'bias_ablation', 'feature_dim')


def run(name, *args, quick=True):
    module = EXPERIMENTS[name][0]
    data = name != 'bits_per_dim'
    return command.main(name, module.__doc__, module.experiment, data, [*(['--quick'] if quick else []), *args])


@pytest.fixture
def one_case(monkeypatch, tmp_path):
    """Two short runs of one model, in a folder with nothing else."""
    monkeypatch.setattr(ablations, 'CASES', [('prf', 8)])
    monkeypatch.setattr(ablations, 'BASES', {'nprf_bias': 'bias'})
    monkeypatch.setattr(curves, 'available', False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_quick_run_is_labelled_and_repeats_nothing_when_continued(name, tmp_path, capsys, monkeypatch):
    module, smaller = EXPERIMENTS[name]
    monkeypatch.setattr(curves, 'available', False)  # the runs' own pictures would take most of the time
    for constant, value in smaller.items():
        monkeypatch.setattr(module, constant, value)
    assert run(name, '--output', str(tmp_path)) == 0
    assert not (tmp_path / f'{name}.csv').exists()
    rows = read_rows(tmp_path / f'quick_{name}.csv')
    assert rows and (tmp_path / f'quick_{name}.png').stat().st_size > 10_000
    assert f'({report.LABEL}) |' in capsys.readouterr().out
    monkeypatch.setattr(runs, 'train', None)  # nothing is left to train
    assert run(name, '--continue', str(tmp_path)) == 0
    assert read_rows(tmp_path / f'quick_{name}.csv') == rows
    assert f'{len(rows)} rows taken over from {tmp_path}/quick_{name}.csv' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['conversion', 'stability', 'bits_per_dim'])
def test_other_images_have_tables_of_their_own(name, tmp_path, monkeypatch, capsys):
    module, smaller = EXPERIMENTS[name]
    monkeypatch.setattr(curves, 'available', False)
    for constant, value in smaller.items():
        monkeypatch.setattr(module, constant, value)
    argv = ['--quick', '--images', 'cifar10', '--output', str(tmp_path)]
    assert command.main(name, '', module.experiment, True, argv, module.IMAGES) == 0
    assert [p.name for p in sorted(tmp_path.glob('*.csv'))] == [f'quick_{name}_cifar10.csv']
    assert all('_cifar10' in folder.name for folder in (tmp_path / 'runs').iterdir())
    argv[-1] = str(tmp_path / 'new')
    assert command.main(name, '', module.experiment, True, [*argv, '--minutes', '-1'], module.IMAGES) == 75
    assert f'experiments.{name} --continue {tmp_path}/new --quick --images cifar10' in capsys.readouterr().err


def test_the_distance_start_is_all_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, 'available', False)
    at, fresh = (distance_run(tmp_path, name) for name in ('nprf_start', 'nprf_bias'))
    assert at.keys() == fresh.keys()
    assert [name for name in at if not torch.equal(at[name], fresh[name])] == ['rel_pos_bias.table']
    table = at['rel_pos_bias.table']
    assert table[:, 1, 1].tolist() == [0, 0] and table[0, 1, 0] == -1 and table[1, 0, 0] == -(0.125**0.5)


def distance_run(folder, option):
    args = command.parse('bias_ablation', '', True, ['--quick', '--output', str(folder / option)], ())
    runner = command.make_runner('bias_ablation', args)
    (run,) = bias_ablation.stage_runs(runner, option, bias_ablation.LONGEST)
    if option == 'nprf_start':
        bias_ablation.write_start(runner, run)
    return build_model(runner.config(run)).state_dict()


def test_each_command_begins_anew_and_the_newest_is_continued(one_case, capsys):
    assert run('ablations') == run('ablations') == 0
    folders = sorted((one_case / 'output').iterdir())
    assert len(folders) == 2 and all((folder / 'quick_ablations.csv').is_file() for folder in folders)
    assert 'taken over' not in capsys.readouterr().out
    (folders[1] / 'quick_ablations.csv').unlink()
    assert run('ablations', '--continue') == 0
    out = capsys.readouterr().out
    assert f'continuing in output/{folders[1].name}' in out
    assert '2 runs trained before, taken over from' in out and 'nprf_bias_prf_8-0, nprf_bias_prf_8-1' in out


def test_a_folder_with_results_is_not_begun_in(one_case, capsys):
    assert run('ablations', '--output', 'here') == 0
    assert run('ablations', '--output', 'here') == 2
    assert 'error: here has results already: --continue here, or begin in another folder' in capsys.readouterr().err
    assert run('ablations', '--continue', 'nowhere') == 2
    assert run('ordering', '--continue') == 2
    assert capsys.readouterr().err.splitlines() == [
        'error: nothing to continue: nowhere has no quick_ablations.csv and no runs',
        'error: nothing to continue: there is no output/quick_ordering-*',
    ]


@pytest.mark.parametrize('name', [name for name in EXPERIMENTS if name != 'bits_per_dim'])
def test_missing_images_are_an_error_of_one_line(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').mkdir()
    for given, said in (
        ([], 'give --data-dir DIR'),
        (['--data-dir', 'nowhere'], 'the data folder nowhere does not exist'),
        (['--data-dir', 'empty'], 'cifar-10-batches-py of CIFAR-10' if name in ON_CIFAR else 'Dataset not found'),
    ):
        assert run(name, *given, quick=False) == 2
        seen = capsys.readouterr()
        assert said in seen.err and len(seen.err.splitlines()) == 1 and '|---|' not in seen.out
    assert not (tmp_path / 'output').exists()


def test_the_shipped_rows_are_continued_only_on_demand(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conversion, 'plot', lambda table, path: None)
    assert run('conversion', '--continue', str(report.RESULTS), quick=False) == 0
    assert '276 rows taken over from' in capsys.readouterr().out


def test_quick_runs_keep_away_from_the_results(capsys):
    with pytest.raises(SystemExit, match='2'):
        run('ablations', '--output', str(report.RESULTS / 'more'))
    assert 'a quick run gives no results' in capsys.readouterr().err


def write_idx(path, array):
    header = struct.pack('>HBB', 0, 8, array.ndim) + struct.pack(f'>{array.ndim}I', *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_a_quick_run_reads_the_images_it_is_given(one_case):
    folder = one_case / 'images' / 'FashionMNIST' / 'raw'
    folder.mkdir(parents=True)
    for part, number in (('train', 80), ('t10k', 50)):
        write_idx(folder / f'{part}-images-idx3-ubyte', np.full((number, 28, 28), 128))
        write_idx(folder / f'{part}-labels-idx1-ubyte', np.zeros(number) + 3)
    assert run('ablations', '--output', 'out', '--data-dir', 'images') == 0
    # all images are one and the same, which is right or wrong as a whole; so are no 40 digits
    assert {float(row['top1']) for row in read_rows(one_case / 'out/quick_ablations.csv')} <= {0, 100}
    assert 'torch/fashion_mnist' in (one_case / 'out/runs/nprf_bias_prf_8-0/config.yaml').read_text()


def test_a_run_out_of_time_is_continued(one_case, capsys, monkeypatch):
    assert run('ablations', '--output', 'out', '--minutes', '-1') == command.UNFINISHED
    said = capsys.readouterr().err
    assert '2 of 2 runs are left; go on with\npython -m experiments.ablations --continue out --quick' in said
    assert '0/2' in said and '2/2' not in said  # the bar counts what was done
    first = one_case / 'out/runs/nprf_bias_prf_8-0'
    first.mkdir(parents=True)
    monkeypatch.setattr(runs, 'passed', lambda deadline: (first / 'steps.csv').is_file())
    assert run('ablations', '--continue', 'out') == command.UNFINISHED  # stops after the first step
    monkeypatch.setattr(runs, 'passed', lambda deadline: False)
    assert run('ablations', '--continue', 'out') == 0
    assert [row['steps'] for row in read_rows(one_case / 'out/quick_ablations.csv')] == ['6', '6']
    assert 'continuing after step 1' in (first / 'log.txt').read_text()


def test_a_trained_run_of_other_settings_is_not_taken_over(one_case, capsys, monkeypatch):
    assert run('ablations', '--output', 'first', '--work', 'runs') == 0
    monkeypatch.setattr(runs, '_TINY', (*runs._TINY, 'model_kwargs.mlp_ratio=1'))
    assert run('ablations', '--output', 'second', '--work', 'runs') == 2
    assert 'belongs to a different configuration (model_kwargs' in capsys.readouterr().err


def test_experiments_share_their_common_runs():
    for base in ablations.BASES:
        ours, theirs = ablations.ablation(base, 'prf', 32)[0], ordering.runs(base, 1)[0]
        assert ours == theirs


def test_commands_say_what_is_set():
    run = runs.Run('deit', 0, ('model=deit_tiny_patch16_224', 'model_kwargs={patch_size: 2, embed_dim: 64}'))
    command = run.command()
    assert command.startswith('python train.py --config configs/fashion_12px.yaml --data-dir DIR --set model=deit_tiny')
    assert "'model_kwargs={patch_size: 2, embed_dim: 64}'" in command and command.endswith('seed=0')


def test_datasets_share_a_file():
    case = high_resolution.cases(high_resolution.FASHION_MNIST, 'nprf_bias_fast')[0]
    command = high_resolution.trained_run(case).command()
    assert command.startswith('python train.py --config configs/cifar10_small.yaml --data-dir DIR --set rel_pos_lr')
    assert 'dataset=torch/fashion_mnist' in command and command.endswith('seed=0')


def test_the_image_table_takes_runs_of_the_larger_sizes():
    case = high_resolution.cases(high_resolution.CIFAR10, 'nprf_bias_fast')[0]
    assert image_table.main_runs('nprf_bias_fast', image_table.FILE_RATE)[0] == high_resolution.trained_run(case)


def test_what_the_image_table_has_is_not_trained_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs.Runner, 'train', lambda self, wanted: ((each, {'top1': 'trained'}) for each in wanted))
    runner = runs.Runner(tmp_path, report.Report(tmp_path, False), None, 1, None)
    first, second, third = image_table.main_runs('nprf', image_table.FILE_RATE)
    assert [last['top1'] for _, last in image_table.shared_runs(runner, [first])] == ['trained']
    table = runs.Table(tmp_path / 'image_table.csv', ('model',))
    table.add({'train_loss': '0.5', 'top1': '80', 'command': second.command()})
    table.add({'train_loss': '', 'top1': '81', 'command': third.command()})  # of another machine, top-1 only
    found = {run.seed: last['top1'] for run, last in image_table.shared_runs(runner, [first, second, third])}
    assert found == {0: 'trained', 1: '80', 2: 'trained'}
    assert '1 runs taken over from' in capsys.readouterr().out


@pytest.mark.parametrize(('lead', 'chosen'), [(0.8, '9e-3'), (1.1, '2.7e-2')])
def test_a_lead_within_the_noise_chooses_no_rate(tmp_path, lead, chosen):
    table = runs.Table(tmp_path / 'image_table.csv', ('model',))
    for rate, top in (('3e-3', 60), ('9e-3', 68), ('2.7e-2', 68 + lead)):
        table.add({'model': 'nprf', 'stage': 'sweep', 'lr': rate, 'top1': top})
    assert image_table.best_rate(table, 'nprf') == chosen


def test_a_run_says_where_its_images_are():
    (run, *_) = bits_per_dim.pixel_runs('prf', 'cifar10')
    assert run.command().startswith(
        'python train.py --config configs/cifar10_pixel_16px.yaml --data-dir DIR/cifar10_16px.npz --set model=prf_pixel'
    )
