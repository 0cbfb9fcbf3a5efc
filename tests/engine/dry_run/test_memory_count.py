"""The count of an update's memory against real updates: their tensors, and the growth of the process."""

import pytest
import torch

from nprf_vit.config.yaml_file import load_config
from nprf_vit.data.batch import Batch, collate
from nprf_vit.engine.build import build_training
from nprf_vit.engine.dry_run.memory_count import CannotCount, _Live, count_memory
from nprf_vit.engine.dry_run.trials import Bench
from nprf_vit.engine.train_step import Clock, train_step
from tests.engine.running import ONE, ROOT, in_child, small_config

DEIT = {'model_kwargs': {'embed_dim': 64, 'depth': 3, 'num_heads': 2, 'patch_size': 2, 'feature_dim': 16}}
DEIT |= {'global_batch': 256, 'batch_size': 256, 'img_size': 16}


def training(**changes):
    return built(small_config(**changes))


def built(config):
    run = build_training(config, ONE, synthetic=True)
    run.wrapped.train()
    return run


def live_peak(run):
    """Bytes of tensors at the peak of the second update of a real run, but for the optimizer's and the average's."""
    samples = run.task.synthetic_samples(run.config, run.model)
    batch = collate([samples[0, i, 0] for i in range(run.plan.micro)])
    train_step(run, iter([Batch(batch.images.clone(), batch.targets.clone())]), 0, Clock())
    with _Live() as live:
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            live.add(tensor)
        train_step(run, iter([Batch(batch.images.clone(), batch.targets.clone())]), 1, Clock())
    return live.peak


@pytest.mark.parametrize(
    'config',
    [
        small_config(**DEIT),
        small_config(**DEIT, amp=True),
        small_config(**DEIT, grad_checkpointing=True),
        small_config(**DEIT, opt='muon'),
        load_config(ROOT / 'configs/digits_pixel.yaml'),
    ],
    ids=['deit', 'amp', 'grad_checkpointing', 'muon', 'pixel'],
)
def test_as_many_bytes_as_the_tensors_of_a_real_update(config):
    run = built(config)
    counted = count_memory(run)
    assert counted.weights + counted.gradients + counted.activations == pytest.approx(live_peak(run), rel=0.1)


def test_the_process_grows_by_about_as_much():
    def work():
        bench = Bench(small_config(**DEIT), ONE, print, depth=3, images=100_000)
        bench.trial(2, 1)  # loads what any update needs
        measured, counted = bench.trial(256, 3).memory, count_memory(training(**DEIT)).total
        print(f'measured {measured / 2**20:.0f} MiB, counted {counted / 2**20:.0f}')
        assert 0.7 < counted / measured < 1.3

    assert in_child(work) == 0


def test_activations_grow_with_the_batch():
    small, large = (count_memory(training(**{**DEIT, 'global_batch': b, 'batch_size': b})) for b in (64, 256))
    assert large[:4] == small[:4]
    assert large.activations == pytest.approx(4 * small.activations, rel=0.1)


def test_a_shape_that_depends_on_numbers_cannot_be_counted(monkeypatch):
    run = training(**DEIT)
    monkeypatch.setattr(run.task, 'loss', lambda logits, targets: logits[torch.nonzero(logits > 0)[:, 0]].sum())
    with pytest.raises(CannotCount):
        count_memory(run)
