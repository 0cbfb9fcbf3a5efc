"""The sample order: a function of the seed and the epoch, cut in the same way for every world size."""

import pytest
import torch

from nprf_vit.data.batch_plan import plan_batches
from nprf_vit.data.sample_order import EvalBatches, SampleOrder, TrainBatches
from nprf_vit.errors import InputError


def keys_of_step(order, world, batch_size, epoch, step):
    """All samples that a world of this size sees in one step, by their slot."""
    plan = plan_batches(order.global_batch, world, batch_size, order.block)
    slots = {}
    for rank in range(world):
        batches = TrainBatches(order, plan, rank)
        batches.start(epoch, step)
        iterator = iter(batches)
        for micro_step in range(plan.accumulation):
            for offset, key in enumerate(next(iterator)):
                slots[plan.first_slot(micro_step, rank) + offset] = key
    return [slots[slot] for slot in range(order.global_batch)]


@pytest.mark.parametrize('repeats', [1, 3])
@pytest.mark.parametrize(('world', 'batch_size'), [(1, 8), (2, 16), (2, 8), (4, 16), (8, 8)])
def test_every_world_sees_the_same_slots(world, batch_size, repeats):
    order = SampleOrder(1000, 64, seed=5, repeats=repeats, block=8)
    for epoch, step in ((0, 0), (0, 14), (3, 7)):
        assert keys_of_step(order, world, batch_size, epoch, step) == keys_of_step(order, 1, 64, epoch, step)


def test_each_image_once_per_epoch_without_repetition():
    order = SampleOrder(1003, 50, seed=1, block=10)
    indices, repeats = order.epoch(4)
    assert indices.shape == (20, 50)
    assert indices.unique().numel() == 1000
    assert not repeats.any()


def test_repetitions_are_numbered_and_kept_apart():
    order = SampleOrder(1003, 48, seed=1, repeats=3, block=8)
    indices, repeats = order.epoch(0)
    pairs = set(zip(indices.flatten().tolist(), repeats.flatten().tolist()))
    assert len(pairs) == indices.numel()  # no augmentation twice
    assert indices.unique().numel() == indices.numel() // 3
    blocks = indices.view(-1, 8)  # a block never mixes an image with itself
    assert all(len(set(block.tolist())) == 8 for block in blocks)


def test_seeds_and_epochs_differ_and_repeat():
    orders = [SampleOrder(100, 10, seed=seed) for seed in (1, 2)]
    assert torch.equal(orders[0].epoch(3)[0], SampleOrder(100, 10, seed=1).epoch(3)[0])
    assert not torch.equal(orders[0].epoch(3)[0], orders[0].epoch(4)[0])
    assert not torch.equal(orders[0].epoch(3)[0], orders[1].epoch(3)[0])


def test_an_epoch_can_be_entered_anywhere():
    order = SampleOrder(1000, 64, seed=5, block=8)
    plan = plan_batches(64, 2, 16, 8)
    batches = TrainBatches(order, plan, rank=1)
    batches.start(2, 0)
    whole = list(batches)
    batches.start(2, 9)
    assert list(batches) == whole[9 * plan.accumulation :]


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        ((100, 3, 50), 'world size 3 does not divide global_batch 100: use 1, 2, 4 processes'),
        ((64, 2, 12, 8), None),
        ((64, 16, 12, 8), 'takes 4 of global_batch 64'),
        ((64, 2, 4, 8), 'whole mixing blocks of 8'),
    ],
)
def test_batches_that_cannot_be_cut(args, message):
    if message is None:
        assert plan_batches(*args).micro == 8
        return
    with pytest.raises(InputError, match=message):
        plan_batches(*args)


def test_training_set_smaller_than_a_batch():
    with pytest.raises(InputError, match='has 9 images, fewer than global_batch 10'):
        SampleOrder(9, 10, seed=0)


@pytest.mark.parametrize('world', [1, 2, 3, 7, 20])
def test_evaluation_shares_cover_each_image_once(world):
    seen = [i for rank in range(world) for batch in EvalBatches(13, 4, rank, world) for i in batch]
    assert sorted(seen) == list(range(13))
