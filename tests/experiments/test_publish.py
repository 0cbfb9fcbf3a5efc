"""Published weights give the number of the run they come from, and what is published here is intact."""

from pathlib import Path

import pytest
from safetensors import safe_open

from experiments import publish
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.model import build_model, load_exact, read_weights
from nprf_vit.engine.train import train
from nprf_vit.engine.validate import validate

from ..engine.running import ONE, run_here
from ..engine.tasks import test_pixel

SHIPPED = sorted((Path(__file__).parents[2] / 'docs' / 'results').glob(f'*/{publish.SUMS}'))


def check(folder):
    """Checksums hold, and the weights are those of the configuration's model."""
    for line in (folder / publish.SUMS).read_text().splitlines():
        expected, name = line.split()
        assert publish.digest(folder / name) == expected
    weights = str(folder / publish.WEIGHTS)
    load_exact(build_model(load_config(folder / 'config.yaml')), read_weights(weights), weights)


def test_published_weights_repeat_the_number(tmp_path, capsys):
    row = run_here(tmp_path / 'run')
    metrics = publish.publish(tmp_path / 'run', tmp_path / 'out')
    check(tmp_path / 'out')
    config = load_config(tmp_path / 'out' / 'config.yaml')
    found = validate(config, ONE, str(tmp_path / 'out' / publish.WEIGHTS))
    assert {name: found[name] for name in metrics} == metrics
    assert metrics['top1'] == row['top1']
    with safe_open(tmp_path / 'out' / publish.WEIGHTS, 'pt') as file:
        assert file.metadata()['epoch'] == '2'


def test_a_model_of_pixels_is_published_with_its_bits(tmp_path):
    row = train(test_pixel.config(epochs=2, val_limit=20), ONE, tmp_path / 'run')
    metrics = publish.publish(tmp_path / 'run', tmp_path / 'out')
    check(tmp_path / 'out')
    assert metrics == {name: row[name] for name in ('bpd', 'bpd_se', 'loss')}


@pytest.mark.parametrize('folder', [path.parent for path in SHIPPED], ids=lambda path: path.name)
def test_what_is_published_here_is_intact(folder):
    check(folder)
    assert (folder / publish.WEIGHTS).stat().st_size < 5e6
    assert load_config(folder / 'config.yaml').data_dir is None  # no path of the machine it was trained on
