"""Four ranks, whose sums of gradients are rounded by the buckets they lie in: a continuation has the same buckets."""

import os
import socket
import traceback

import pytest
import torch
from torch import nn

from nprf_vit.data.batch import Batch
from nprf_vit.engine import build
from nprf_vit.engine.build import Training, build_training
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.train import train
from nprf_vit.engine.train_step import Clock, train_step
from nprf_vit.engine.warm_up import unused_parameters, warm_up
from tests.engine.running import ONE, assert_same_end, same, small_config, state

WORLD = 4
CHANGES = {'batch_size': 8, 'mixup_block': 4, 'log_interval': 1}


def in_ranks(work):
    """Run `work(place)` in forked processes that are joined by gloo; all must end well."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {'RANK': str(rank), 'WORLD_SIZE': str(WORLD), 'LOCAL_RANK': str(rank)}
                os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
                with process_group('cpu', threads=1, stall_timeout=120) as place:
                    work(place)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * WORLD


def train_in_ranks(folder, resume=None, stop_at=None, **keys):
    stop = None if stop_at is None else (lambda step: step >= stop_at)
    in_ranks(lambda place: train(small_config(**keys), place, folder, resume, stop))


def whole_and_continued(folder, keys):
    train_in_ranks(folder / 'whole', **keys)
    train_in_ranks(folder / 'out', stop_at=4, **keys)
    train_in_ranks(folder / 'out', resume='auto', **keys)
    return folder / 'whole', folder / 'out'


def test_a_continuation_rounds_as_the_run_that_it_continues(scans, tmp_path):
    assert_same_end(*whole_and_continued(tmp_path, {**scans, **CHANGES}))


@pytest.mark.slow
def test_without_the_warm_up_it_would_not(scans, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, 'warm_up', lambda self: None)
    whole, continued = whole_and_continued(tmp_path, {**scans, **CHANGES})
    assert any(name.startswith('/state_dict/') for name in same(state(whole), state(continued)))


def test_a_parameter_without_a_gradient_is_known_beforehand(monkeypatch):
    """DDP looks for unused parameters where there are any, and there only."""
    config = small_config(**CHANGES)

    def two_steps(place):
        run = build_training(config, place, synthetic=True)
        run.warm_up()
        sample = run.task.synthetic_samples(config, run.model)[0, place.rank, 0]
        images = sample.image.expand(run.plan.micro, *sample.image.shape)
        for step in range(2):
            batches = [Batch(images.clone(), torch.full((run.plan.micro,), sample.target))] * run.plan.accumulation
            train_step(run, iter(batches), step, Clock())
        return run.wrapped.find_unused_parameters

    def work(place):
        assert two_steps(place) is False
        plain = build.build_model

        def with_idle(*args, **options):
            model = plain(*args, **options)
            model.idle = nn.Parameter(torch.zeros(3))
            return model

        monkeypatch.setattr(build, 'build_model', with_idle)
        assert two_steps(place) is True

    in_ranks(work)


def test_a_warm_up_leaves_no_trace():
    config = small_config(model='resnet10t', model_kwargs={}, img_size=32, drop_path=0.0)
    run = build_training(config, ONE, synthetic=True)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    warm_up(config, run.model, run.wrapped, run.task, run.autocast, run.plan.micro)
    assert same(before, dict(run.model.state_dict())) == []  # batch norm's averages too
    assert all(p.grad is None for p in run.model.parameters())
    assert unused_parameters(config, run.model, run.task, run.autocast) == []
    run.model.idle = nn.Parameter(torch.zeros(3))
    assert unused_parameters(config, run.model, run.task, run.autocast) == ['idle']
