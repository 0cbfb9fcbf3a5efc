"""Two torchrun agents: workers die, the group restarts, and the run ends as if nothing had been."""

import json
import signal

import pytest
import torch

from nprf_vit.engine.output.csv_file import read_rows
from tests.engine.running import assert_same_end, config_file, launch, wait_for

from .agents import Agents


@pytest.fixture
def file(scans, tmp_path):
    return config_file(tmp_path, **{**scans, 'batch_size': 8, 'recovery_interval': 1, 'log_interval': 1})


def launches(folder):
    return json.loads((folder / 'launches.json').read_text(encoding='utf-8'))


def test_a_killed_worker_restarts_the_group(file, tmp_path):
    """One worker per agent: the one that dies is also all that its agent has."""
    launch('train.py', '--config', file, '--output', tmp_path / 'whole', processes=2)
    with Agents(tmp_path, 'tests/engine/faulty.py', file, tmp_path / 'out', 'die', 1, 7) as agents:
        agents.start(), agents.start()
        assert agents.wait() == [0, 0], agents.output_text()
    assert [entry['world_size'] for entry in launches(tmp_path / 'out')] == [2, 2]
    assert 'continuing after step 6' in agents.output_text()
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


@pytest.mark.slow
@pytest.mark.parametrize('ranks', ['3', '2,3'])
def test_one_worker_and_all_workers_of_an_agent(file, tmp_path, ranks):
    """With four ranks sums do not commute any more, so this also sees whether they are formed in the same order."""
    launch('train.py', '--config', file, '--output', tmp_path / 'whole', processes=4)
    with Agents(tmp_path, 'tests/engine/faulty.py', file, tmp_path / 'out', 'die', ranks, 7, processes=2) as agents:
        agents.start(), agents.start()
        assert agents.wait() == [0, 0], agents.output_text()
    assert 'continuing after step 6' in agents.output_text()
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')


@pytest.mark.slow
def test_a_lost_node_leaves_a_smaller_group_on_the_same_order(scans, tmp_path):
    """Two nodes, then one, then two: the losses stay those of one process."""
    keys = {**scans, 'recovery_interval': 1, 'log_interval': 1, 'drop': 0.0, 'drop_path': 0.0, 'epochs': 40}
    file = config_file(tmp_path, **keys)
    launch('train.py', '--config', file, '--output', tmp_path / 'whole')
    out = tmp_path / 'out'
    with Agents(tmp_path, 'train.py', '--config', file, '--output', out, '--resume', 'auto', nodes='1:2') as agents:
        # or the first agent would not tell one that joins later where the store is
        env = {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
        agents.start(**env)
        wait_for(agents.has_store, 'the store, or it may be that of the second, and end with it')
        second = agents.start(**env)
        wait_for((out / 'last.pt').is_file, 'a checkpoint of both')
        second.kill()  # and with it its workers
        second.wait()
        wait_for(lambda: launches(out)[-1]['world_size'] == 1, 'the smaller group')
        third = agents.start(**env)
        assert agents.wait()[0] == third.returncode == 0, agents.output_text()
    worlds = [entry['world_size'] for entry in launches(out)]
    assert worlds[:2] == [2, 1]
    one, two = ([float(row['loss']) for row in read_rows(f / 'steps.csv')] for f in (tmp_path / 'whole', out))
    assert len(one) == len(two) == 200
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agents_reaches_the_workers(scans, tmp_path, number):
    keys = {**scans, 'epochs': 40, 'log_interval': 1}
    file = config_file(tmp_path, **keys)
    launch('train.py', '--config', file, '--output', tmp_path / 'whole', processes=2)
    args = '--config', file, '--output', tmp_path / 'out', '--resume', 'auto'
    with Agents(tmp_path, 'train.py', *args) as agents:
        agents.start(), agents.start()
        wait_for((tmp_path / 'out' / 'last.pt').is_file, 'a checkpoint')
        for agent in agents.processes:
            agent.send_signal(number)
        assert all(agents.wait(60)), agents.output_text()
    assert 'stopped at step' in agents.output_text()
    launch('train.py', *args, processes=2)
    assert_same_end(tmp_path / 'whole', tmp_path / 'out')
