"""Two nodes whose link goes dead: both sides end, each with a line, whether it can reach the store or not."""

import re
import time

import pytest

from nprf_vit.errors import Exit
from tests.engine.running import config_file, wait_for

from .nodes import ADDRESSES, NodeAgents, Nodes

STALL, JOIN, RETRIES = 20, 30, 6  # seconds, seconds, and the kernel's tcp_retries2: about 13 s until it gives up
BOUND = 150  # seconds, on a busy machine; measured 25 to 37 without restarts, 36 to 89 with


@pytest.mark.slow
@pytest.mark.parametrize('how, restarts', [('cut', 0), ('unplug', 3)])
def test_both_sides_end(scans, tmp_path, how, restarts):
    keys = {**scans, 'epochs': 4000, 'recovery_interval': 5, 'stall_timeout': float(STALL)}
    file = config_file(tmp_path, **keys)
    args = tmp_path, '--config', file, '--output', tmp_path / 'out', '--resume', 'auto'
    script, conf = 'tests/engine/distributed/recorded.py', f'join_timeout={JOIN}'
    with Nodes(RETRIES) as nodes, NodeAgents(nodes, tmp_path, script, *args, conf=conf, restarts=restarts) as both:
        both.start(), both.start()
        wait_for((tmp_path / 'out' / 'last.pt').is_file, 'a checkpoint of both', 240)
        getattr(nodes, how)()
        begin, cut = time.monotonic(), time.time()
        assert all(both.wait(BOUND)), both.output_text()
        assert time.monotonic() - begin < BOUND
    for rank in range(2):  # the first end of each: with restarts left there may be another
        code, when = (tmp_path / f'end{rank}').read_text(encoding='utf-8').splitlines()[0].split()
        print(f'rank {rank} ended {float(when) - cut:.1f} s after the cut with {code}')
        assert int(code) == Exit.STALLED
    near, far = ((tmp_path / f'agent{i}.log').read_text(encoding='utf-8', errors='replace') for i in range(2))
    # the seconds are those at which the watchdog came to look, one or two late on a busy machine
    assert re.search(r'error \(rank 0\): stalled: rank 1 \(silent for 2\d s, last in ', near)
    assert f'error (rank 1): the store at {ADDRESSES[0]}:' in far and 'is cut off; stall_timeout is 20 s' in far
    if not restarts:  # with restarts left the agent goes on to ask for a new group, and that is what fails
        assert 'exitcode  : 70' in near
