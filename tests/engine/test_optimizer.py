"""Learning rates that differ between parameters."""

import pytest

from nprf_vit.config.schema import differences
from nprf_vit.engine.lr_schedule import build_schedule
from nprf_vit.engine.model import build_model
from nprf_vit.engine.optimizer import build_optimizer
from nprf_vit.errors import InputError

from .running import small_config


def rates(**changes):
    """Learning rate at the peak of the schedule, by parameter name, and the one that is reported."""
    config = small_config(**changes)
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    schedule = build_schedule(config, optimizer, steps_per_epoch=10)
    schedule.step_update(10)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (g['lr'], g['weight_decay']) for g in optimizer.param_groups for p in g['params']}
    assert sum(len(g['params']) for g in optimizer.param_groups) == len(found) == len(names)  # each exactly once
    return found, schedule.lr


@pytest.mark.parametrize('rel_pos', ['shared', 'layer'])
@pytest.mark.parametrize('layer_decay', [None, 0.5])
def test_bias_tables_get_their_own_rate_and_nothing_else_changes(rel_pos, layer_decay):
    kwargs = {**small_config().model_kwargs, 'rel_pos': rel_pos}
    plain, _ = rates(model_kwargs=kwargs, layer_decay=layer_decay)
    scaled, reported = rates(model_kwargs=kwargs, layer_decay=layer_decay, rel_pos_lr_scale=10.0)
    for name, (lr, decay) in plain.items():
        factor = 10 if name.endswith('table') else 1
        assert scaled[name] == (pytest.approx(factor * lr), decay)
    assert reported == scaled['head.weight'][0]
    assert not [n for n in scaled if n.endswith('table') and scaled[n][0] == reported]


def test_a_scale_without_a_bias_is_refused():
    kwargs = {**small_config().model_kwargs, 'rel_pos': 'none'}
    with pytest.raises(InputError, match='rel_pos_lr_scale 10.0: KernelVisionTransformer has no relative'):
        rates(model_kwargs=kwargs, rel_pos_lr_scale=10.0)


def test_a_checkpoint_from_before_a_key_existed_still_continues():
    new = small_config().to_dict()
    old = {name: value for name, value in new.items() if name != 'rel_pos_lr_scale'}
    assert differences(old, new) == []
    assert differences(old, {**new, 'rel_pos_lr_scale': 3.0}) == ['rel_pos_lr_scale: 1.0 there, 3.0 here']
