"""The progress of an evaluation: the batches as they are, and how far they are."""

import sys
from dataclasses import replace

import pytest
import torch

from nprf_vit.data.batch import Batch
from nprf_vit.engine.output.eval_progress import show_progress
from tests.engine.running import ONE

BATCHES = [Batch(torch.zeros(size, 1), torch.zeros(size)) for size in (4, 4, 2)]


def test_a_log_gets_lines_with_the_time_left(capsys):
    assert list(show_progress(BATCHES, ONE, 10, quiet_seconds=0)) == BATCHES
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith('evaluated 4 of 10, left 0:00:0') and second.startswith('evaluated 8 of 10, left ')


def test_a_short_evaluation_says_nothing(capsys):
    assert list(show_progress(BATCHES, ONE, 10)) == BATCHES
    assert capsys.readouterr() == ('', '')


def test_a_stream_has_no_end_to_wait_for(capsys):
    list(show_progress(BATCHES, ONE, None, quiet_seconds=0))
    assert capsys.readouterr().err == 'evaluated 4\nevaluated 8\nevaluated 10\n'


def test_ranks_are_counted_together_and_one_speaks(capsys):
    main, other = (replace(ONE, rank=rank, world=2) for rank in (0, 1))
    list(show_progress(BATCHES, other, 19, quiet_seconds=0))
    assert capsys.readouterr().err == ''
    list(show_progress(BATCHES, main, 19, quiet_seconds=0))
    assert [line.split(',')[0] for line in capsys.readouterr().err.splitlines()] == [
        'evaluated 8 of 19',
        'evaluated 16 of 19',
    ]


def test_a_bar_is_cleared_when_the_evaluation_stops(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    with pytest.raises(RuntimeError):
        for _ in show_progress(BATCHES, ONE, 10):
            raise RuntimeError
    assert capsys.readouterr().err.endswith('\r')
