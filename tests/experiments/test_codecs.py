"""Bits per dimension of picture files and of a histogram per byte."""

import numpy as np
import pytest

from benchmarks.report import RESULTS, read_csv
from experiments import codecs
from experiments.histogram import PRIOR, bits_per_image


def test_histogram_is_the_mean_of_what_each_byte_costs():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (40, 2, 3, 3), dtype=np.uint8)
    test = np.concatenate([train[:3], rng.integers(0, 256, (4, 2, 3, 3), dtype=np.uint8)])
    expected = []
    for image in test:
        for place in np.ndindex(2, 3, 3):
            seen = [int(each[place]) for each in train].count(int(image[place]))
            expected.append(-np.log2((seen + PRIOR) / (40 + 256 * PRIOR)))
    assert bits_per_image(train, test, 256).mean() == pytest.approx(np.mean(expected))


@pytest.mark.parametrize('name', codecs.FORMATS)
def test_files_of_noise_take_eight_bits_and_of_one_colour_nothing(name):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (600, 16, 16, 3), dtype=np.uint8)
    assert 8 < codecs.file_bits(noise, codecs.FORMATS[name]) < 9
    assert codecs.file_bits(np.full_like(noise, 7), codecs.FORMATS[name]) < 0.1


def test_quick_run_says_bits(tmp_path, capsys):
    assert codecs.main(['--quick', '--output', str(tmp_path)]) == 0
    rows = read_csv(tmp_path / 'quick_codecs.csv')
    assert [row['way'] for row in rows] == ['histogram per byte', *codecs.FORMATS]
    assert '| 8x8 | 360 | PNG |' in capsys.readouterr().out


def test_without_a_folder_or_with_a_wrong_one_it_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        codecs.main([])
    assert codecs.main(['--data-dir', str(tmp_path), '--output', str(tmp_path / 'new')]) == 2
    assert 'data_batch_1' in capsys.readouterr().err


def test_shipped_rows_order_as_known():
    found = {(row['pixels'], row['way']): row['bits_per_dim'] for row in read_csv(RESULTS / 'codecs.csv')}
    for side in ('16x16', '32x32'):
        assert found[side, 'WebP'] < found[side, 'PNG'] < found[side, 'histogram per byte'] < 8
