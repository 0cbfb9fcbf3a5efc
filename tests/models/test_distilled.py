"""The distillation token and its head."""

import pytest
import timm
import torch

import nprf_vit
from nprf_vit.models.distilled import KernelVisionTransformerDistilled

from .small import SMALL, make


def distilled(**kwargs):
    return make('nprf_deit_base_distilled', **kwargs)


@pytest.mark.parametrize('rel_pos', ['shared', 'layer', 'none'])
def test_two_heads_whose_mean_counts(rel_pos, image):
    model = distilled(rel_pos=rel_pos)
    assert isinstance(model, KernelVisionTransformerDistilled) and model.num_prefix_tokens == 2
    assert all(bias.num_prefix_tokens == 2 for bias in model.bias_modules().values())
    x = model.forward_features(image)
    expected = (model.head(x[:, 0]) + model.head_dist(x[:, 1])) / 2
    torch.testing.assert_close(model(image), expected)
    model.train().set_distilled_training()
    one, other = model(image)
    (one.sum() + 2 * other.sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_softmax_without_a_bias_is_timms(image):
    options = {k: v for k, v in SMALL.items() if k != 'feature_dim'}
    theirs = timm.create_model('deit_base_distilled_patch16_224', **options).eval()
    ours = distilled(rel_pos='none', kernel='softmax', normalize=False)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(image), theirs(image))
    ours.set_input_size((96, 64))
    theirs.set_input_size((96, 64))
    image = torch.randn(2, 3, 96, 64)
    torch.testing.assert_close(ours(image), theirs(image))


def test_a_distilled_deit_loads_and_keeps_both_heads(caplog):
    options = {k: v for k, v in SMALL.items() if k != 'feature_dim'}
    theirs, ours = timm.create_model('deit_base_distilled_patch16_224', **options), distilled()
    ours.load_state_dict(theirs.state_dict())
    assert 'dropped pos_embed' in caplog.text and 'rel_pos_bias.prefix_to_prefix (zero)' in caplog.text
    assert torch.equal(ours.head_dist.weight, theirs.head_dist.weight)
    assert torch.equal(ours.dist_token, theirs.dist_token)


def test_the_class_token_keeps_its_bias_beside_a_distillation_token(caplog):
    source, model = make(class_token=True, global_pool='token'), distilled()
    model.load_state_dict(source.state_dict())
    assert "added head_dist.weight (the model's own)" in caplog.text
    torch.testing.assert_close(model.rel_pos_bias.token_to_prefix[:, :1], source.rel_pos_bias.token_to_prefix)
    assert (model.rel_pos_bias.token_to_prefix[:, 1] == 0).all()


def test_timm_manners(image):
    model = distilled()
    model.reset_classifier(7)
    assert model(image).shape == (2, 7) and model.head_dist.out_features == 7
    assert {'cls_token', 'dist_token', 'rel_pos_bias.prefix_to_prefix'} <= model.no_weight_decay()
    with torch.device('meta'):
        assert timm.create_model('nprf_deit_base_distilled').pretrained_cfg['classifier'] == ('head', 'head_dist')
    twin = nprf_vit.convert(distilled(kernel='softmax'), feature_dim=8)
    assert isinstance(twin, KernelVisionTransformerDistilled) and twin(image).isfinite().all()


@pytest.mark.parametrize('kwargs', [{'global_pool': 'avg'}, {'class_token': False}, {'reg_tokens': 2}])
def test_what_the_heads_need(kwargs):
    with pytest.raises(ValueError, match='the heads read the class and the distillation token'):
        distilled(**kwargs)
