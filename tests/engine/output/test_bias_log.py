"""rel_pos_bias.jsonl: the mean bias at each distance, a line per epoch, the same however often a run is stopped."""

import json

import torch

from nprf_vit.engine.output.bias_log import MOST_LINES, BiasLog
from nprf_vit.layers import RelPosBias
from tests.engine.running import run_here


def lines(folder):
    return [json.loads(line) for line in (folder / 'rel_pos_bias.jsonl').read_text().splitlines()]


def test_rings_of_a_grid(tmp_path):
    bias = RelPosBias((2, 3), 1)
    with torch.no_grad():
        bias.table.copy_(torch.arange(15.0).reshape(1, 3, 5))
    log = BiasLog(tmp_path / 'rel_pos_bias.jsonl', 0)
    log.add(torch.nn.Sequential(bias), step=7, epoch=3)
    log.flush()
    (line,) = lines(tmp_path)
    # distance 1: 6, 8 beside, 2, 12 above and below, 1, 3, 11, 13 at the corners; 2: the others
    ring = line['tables']['0']
    assert (line['epoch'], line['step'], ring['distance']) == (3, 7, [0, 1, 2])
    assert ring['heads'] == [[7.0, 7.0, 7.0]]
    with torch.no_grad():
        bias.table[0, 1, 2] = 1.0
    log.add(torch.nn.Sequential(bias), step=8, epoch=4)
    log.flush()
    assert lines(tmp_path)[1]['tables']['0']['heads'] == [[1.0, 7.0, 7.0]], 'the middle is distance 0'


def test_a_sequence_looks_back_in_growing_steps(tmp_path):
    bias = RelPosBias((6,), 1)
    with torch.no_grad():
        bias.table.copy_(torch.tensor([[5.0, 4, 3, 2, 1, 0, 99, 99, 99, 99, 99]]))  # b_{-k} = k
    log = BiasLog(tmp_path / 'rel_pos_bias.jsonl', 0)
    log.add(bias, step=1, epoch=1)
    log.flush()
    profile = lines(tmp_path)[0]['tables']['']
    assert profile == {'distance': [0, 1, 3], 'heads': [[0.0, 1.5, 4.0]]}


def test_a_long_run_has_few_lines(tmp_path):
    log = BiasLog(tmp_path / 'a', 0)
    due = [epoch for epoch in range(1, 302) if log.due(epoch, 301)]
    assert len(due) <= MOST_LINES + 1 and due[-1] == 301
    assert all(log.due(epoch, 3) for epoch in (1, 2, 3))


def test_a_stopped_run_ends_with_the_same_lines(tmp_path):
    short = {'global_batch': 512, 'warmup_epochs': 0}  # 2 or 3 steps each
    run_here(tmp_path / 'whole', **short)
    run_here(tmp_path / 'parts', stop_at=4, **short)
    run_here(tmp_path / 'parts', resume='auto', **short)
    assert lines(tmp_path / 'whole') == lines(tmp_path / 'parts')
    assert [line['epoch'] for line in lines(tmp_path / 'whole')] == [0, 1, 2]
