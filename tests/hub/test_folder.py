"""A run as a folder for the Hub: timm loads it to the same numbers, and the card says what the run's files say."""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.models import save_for_hf

from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.csv_file import read_rows
from nprf_vit.engine.train import train
from nprf_vit.hub.__main__ import main

from ..engine.running import ONE, ROOT, run_here
from ..engine.tasks.test_pixel import config as pixel_config

DIGITS = ROOT / 'docs' / 'results' / 'digits'


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    run_here(folder, epochs=1, warmup_epochs=0)
    return folder


def metadata(folder: Path) -> dict:
    return yaml.safe_load((folder / 'README.md').read_text(encoding='utf-8').split('---')[1])


def load(folder: Path):
    return timm.create_model(f'local-dir:{folder}', pretrained=True).eval()


@pytest.mark.parametrize('ema', [False, True])
def test_timm_loads_what_the_run_saved(ema, run, tmp_path):
    assert main([str(run), str(tmp_path / 'hub'), *(['--ema'] if ema else [])]) == 0
    model = load(tmp_path / 'hub')
    content = read_checkpoint(run / 'best.pt')
    saved = content['state_dict_ema' if ema else 'state_dict']
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    cfg = timm.data.resolve_model_data_config(model)
    assert [*cfg['input_size'], *cfg['mean'], *cfg['std'], cfg['crop_pct']] == [1, 8, 8, 0.3, 0.37, 1.0]
    assert model(torch.randn(1, 1, 8, 8)).shape == (1, 10)
    prefix = 'ema_' if ema else ''
    values = {m['name']: m['value'] for m in metadata(tmp_path / 'hub')['model-index'][0]['results'][0]['metrics']}
    row = read_rows(run / 'summary.csv')[-1]
    assert values['top-1'] == round(float(row[f'{prefix}top1']), 2)
    assert values['cross-entropy'] == round(float(row[f'{prefix}loss']), 4)


def test_the_card_of_the_shipped_digits(tmp_path):
    """Its numbers are those of its epoch in summary.csv, its code runs, and there is a picture."""
    folder = tmp_path / 'digits'
    assert main([str(DIGITS), str(folder), '--license', 'mit', '--name', 'my digits']) == 0
    text = (folder / 'README.md').read_text(encoding='utf-8')
    assert '# my digits\n' in text and '| epoch 30 of 36 | 98.61 | 100.00 | 0.1351 | 360 |' in text
    about = metadata(folder)
    assert about['license'] == 'mit' and about['library_name'] == 'timm' and 'nprf_vit' in about['tags']
    assert (folder / 'curves.png').stat().st_size > 10_000 and '(curves.png)' in text
    (code,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    names = {'image': Image.new('L', (20, 30))}
    exec(code.replace('local-dir:FOLDER', f'local-dir:{folder}'), names)
    assert names['logits'].shape == (1, 10)
    (settings,) = re.findall(r'```yaml\n(.*?)```', text, re.DOTALL)
    assert yaml.safe_load(settings)['lr'] == 0.004 and 'data_dir' not in settings


def test_no_path_of_this_machine_is_published(run, tmp_path):
    config = run.parent / 'with paths'
    shutil.copytree(run, config)
    given = (config / 'config.yaml').read_text()
    changed = given.replace('data_dir: null', 'data_dir: /secret/data')
    changed = changed.replace('initial_checkpoint: null', 'initial_checkpoint: /secret/weights.pt')
    assert changed.count('/secret') == 2
    (config / 'config.yaml').write_text(changed)
    assert main([str(config), str(tmp_path / 'hub')]) == 0
    for name in ('README.md', 'config.json', 'config.yaml', 'summary.csv'):
        text = (tmp_path / 'hub' / name).read_text(encoding='utf-8')
        assert '/secret' not in text and str(tmp_path) not in text, name


def test_fine_tuned_from_shipped_weights(tmp_path):
    """A tag's arguments and another number of classes than those of its labels go along."""
    run_here(
        tmp_path / 'run', model='nprf_deit_tiny.digits', pretrained=True, model_kwargs={}, epochs=1, warmup_epochs=0
    )
    assert main([str(tmp_path / 'run'), str(tmp_path / 'hub')]) == 0
    model = load(tmp_path / 'hub')
    saved = read_checkpoint(tmp_path / 'run' / 'best.pt')['state_dict']
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / 'hub' / 'config.json').read_text())
    assert config['model_args']['embed_dim'] == 64 and '98.61' not in config['pretrained_cfg']['description']


def test_a_model_of_pixels(tmp_path):
    train(pixel_config(epochs=2), ONE, tmp_path / 'run')
    assert main([str(tmp_path / 'run'), str(tmp_path / 'hub')]) == 0
    model = load(tmp_path / 'hub')
    saved = read_checkpoint(tmp_path / 'run' / 'best.pt')['state_dict']
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    metrics = metadata(tmp_path / 'hub')['model-index'][0]['results'][0]['metrics']
    assert metrics[0]['name'] == 'bits/dim' and metrics[0]['value'] > 0


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['nowhere', 'hub'], 'no such run'),
        (['.', 'hub'], 'holds no run'),
        (['RUN', 'full'], 'FOLDER .*full: expected a new or an empty folder'),
        (['RUN', 'hub', '--checkpoint', 'none.pt'], 'none.pt'),
        (['DIGITS', 'hub', '--ema'], 'has no moving average'),
        (['RUN', 'hub', '--push', 'a/b/c'], '--push a/b/c: '),
        (['RUN', 'hub', '--push', 'name'], 'expected USER/NAME'),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, said, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'file').touch()
    places = {'RUN': str(run), 'DIGITS': str(DIGITS)}
    assert main([places.get(a, a) for a in arguments]) != 0
    error = capsys.readouterr().err
    assert error.startswith('error: ') and error.count('\n') == 1 and re.search(said, error)
    assert not (tmp_path / 'hub').exists()


def test_timms_own_function_on_a_model_without_a_run(tmp_path):
    model = timm.create_model('nprf_deit_tiny', img_size=32, depth=1, num_classes=3).eval()
    save_for_hf(model, str(tmp_path), model_args={'img_size': 32, 'depth': 1, 'num_classes': 3})
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(load(tmp_path)(image), model(image), rtol=0, atol=0)
