"""The peers run, and those with a bias compute attention with that bias. No clock is asserted here."""

import csv

import pytest
import torch

from benchmarks import peers
from benchmarks.layer import Layer


@pytest.fixture
def without_compiler(monkeypatch):
    """Compiling takes half a minute; the eager form computes the same."""
    monkeypatch.setattr(torch, 'compile', lambda function, **kwargs: function)


def test_quick_run_writes_a_table_and_a_picture(without_compiler, tmp_path, capsys):
    peers.main(['--quick', '--output', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / 'quick_peers.csv').open()))
    assert {r['mode'] for r in rows} == {'forward', 'forward+backward'}
    for r in rows:
        measured = r['seconds'] not in (peers.MISSING, peers.NO_BACKWARD)
        assert not measured or (float(r['seconds']) > 0 and float(r['time_of_ours']) > 0)
        if r['contender'] == peers.OURS:
            assert float(r['time_of_ours']) == 1
    assert (tmp_path / 'quick_peers.png').stat().st_size > 10_000
    assert 'where we lose' in capsys.readouterr().out


def test_a_performer_that_is_not_installed_is_reported(without_compiler, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, 'find_spec', lambda name: None)
    assert peers.contenders(peers.QUICK[0])[peers.PERFORMER] == peers.MISSING


def test_softmax_peers_agree_on_the_bias(without_compiler):
    layer = Layer((3, 5), heads=2)
    layer.bias = torch.randn(2, 5, 9)
    masked, flex = peers.softmax_with_bias(layer)(), peers.flex_with_bias(layer)()
    torch.testing.assert_close(masked, flex, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked, layer.sdpa()(), atol=1e-2)


def test_the_straightforward_fft_is_our_attention():
    layer = Layer((4, 6), heads=2)
    torch.testing.assert_close(peers.public_fft(layer)(), layer.ours()(), rtol=1e-4, atol=1e-5)


def test_losses_name_the_peers_only():
    rows = [
        {'grid': '8x8', 'mode': 'forward', 'contender': name, 'time_of_ours': time, 'memory_of_ours': '0.5'}
        for name, time in ((peers.OURS, '1.0'), (peers.LINEAR, '9.0'), ('a', '2.0'), ('b', '0.5'), ('c', ''))
    ]
    assert peers.losses(rows) == ['8x8, forward: 2.00x the time of a']
