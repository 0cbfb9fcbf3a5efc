"""The embedded demonstration of the pixel model beats a histogram and the same model without its bias."""

from pathlib import Path

import pytest

from experiments.histogram import histogram_bits
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.train import train
from tests.engine.running import ONE

CONFIG = Path(__file__).resolve().parents[2] / 'configs' / 'digits_pixel.yaml'


def test_histogram():
    bits, error = histogram_bits()
    assert bits == pytest.approx(2.4137, abs=1e-4) and error == pytest.approx(0.0107, abs=1e-4)
    assert all(histogram_bits(prior)[0] > bits for prior in (0.3, 0.5, 1.0))


@pytest.mark.slow
def test_bias_beats_no_bias_beats_histogram(tmp_path):
    bits = {}
    for rel_pos in ('shared', 'none'):
        config = load_config(CONFIG, [f'model_kwargs.rel_pos={rel_pos}'])
        train(config, ONE, tmp_path / rel_pos)
        bits[rel_pos] = read_checkpoint(tmp_path / rel_pos / 'best.pt')['metrics'][config.eval_metric]
    assert bits['shared'] < bits['none'] < histogram_bits()[0]
