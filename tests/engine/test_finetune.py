"""Starting from other weights: another resolution, other classes, a DeiT checkpoint."""

import pytest
import timm
import torch

from nprf_vit.engine.model import build_model
from nprf_vit.engine.validate import validate
from nprf_vit.errors import InputError

from .running import ONE, SMALL, assert_same_end, run_here, small_config


def test_from_our_checkpoint_at_another_resolution(tmp_path):
    base = run_here(tmp_path / 'base', epochs=1, warmup_epochs=0)
    start = {'initial_checkpoint': str(tmp_path / 'base' / 'best.pt'), 'img_size': 12, 'epochs': 1, 'warmup_epochs': 0}
    model = build_model(small_config(**start))
    old = torch.load(tmp_path / 'base' / 'best.pt', weights_only=True)['state_dict']
    assert old['rel_pos_bias.table'].shape[1:] == (7, 7)
    assert model.rel_pos_bias.table.shape[1:] == (11, 11)
    assert torch.equal(model.blocks[0].attn.qkv.weight, old['blocks.0.attn.qkv.weight'])
    tuned = run_here(tmp_path / 'tuned', **start, lr=1e-4)
    assert tuned['images'] == base['images']
    # a continuation does not need the file it started from
    (tmp_path / 'base' / 'best.pt').unlink()
    assert run_here(tmp_path / 'tuned', resume='auto', **start, lr=1e-4)['step'] == tuned['step']


@pytest.mark.parametrize('kind', ['extend', 'cells'])
def test_a_continued_bias_is_tuned_stopped_continued_and_validated(kind, tmp_path):
    """The table's size is that of the checkpoint, which no key of the configuration has to repeat."""
    run_here(tmp_path / 'base', epochs=1, warmup_epochs=0)
    kwargs = {**SMALL['model_kwargs'], 'rel_pos_extend': kind}
    start = {
        'initial_checkpoint': str(tmp_path / 'base' / 'best.pt'),
        'img_size': 12,
        'model_kwargs': kwargs,
        'epochs': 1,
    }
    start |= {'warmup_epochs': 0, 'lr': 1e-2}
    whole = run_here(tmp_path / 'whole', **start)
    tuned, old = (torch.load(tmp_path / x / 'best.pt', weights_only=True)['state_dict'] for x in ('whole', 'base'))
    assert tuned['rel_pos_bias.table'].shape[1:] == (7, 7)
    assert kind == 'cells' or tuned['rel_pos_bias.far'].abs().min() > 0
    assert not torch.equal(tuned['rel_pos_bias.table'], old['rel_pos_bias.table'])
    assert run_here(tmp_path / 'parts', stop_at=3, **start) is None
    run_here(tmp_path / 'parts', resume='auto', **start)
    assert_same_end(tmp_path / 'whole', tmp_path / 'parts')
    found = validate(small_config(**start), ONE, str(tmp_path / 'whole' / 'last.pt'))
    assert found['top1'] == whole['top1'] and found['loss'] == whole['loss']


def test_other_classes_get_a_fresh_head(tmp_path, caplog):
    run_here(tmp_path, epochs=1, warmup_epochs=0)
    start = {'initial_checkpoint': str(tmp_path / 'last.pt'), 'num_classes': 7}
    model = build_model(small_config(**start))
    assert model.head.weight.shape[0] == 7
    assert 'head.weight' in caplog.text


def test_prf_row_from_a_deit_checkpoint(tmp_path):
    """The file's layout is DeiT's: {'model': state dict with a class token}; head and positions carry over."""
    args = {'img_size': 32, 'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 2, 'num_classes': 10}
    deit = timm.create_model('deit_base_patch16_224', **args)
    torch.save({'model': deit.state_dict()}, tmp_path / 'deit.pth')
    kwargs = {k: args[k] for k in ('patch_size', 'embed_dim', 'depth', 'num_heads')}
    config = small_config(
        model='prf_deit_base',
        model_kwargs=kwargs,
        img_size=32,
        in_chans=3,
        mean=None,
        std=None,
        initial_checkpoint=str(tmp_path / 'deit.pth'),
    )
    model = build_model(config)
    assert torch.equal(model.head.weight, deit.head.weight)
    assert torch.equal(model.pos_embed, deit.pos_embed[:, 1:])
    assert torch.equal(model.blocks[1].mlp.fc1.weight, deit.blocks[1].mlp.fc1.weight)
    assert not model.blocks[0].attn.qkv.weight.isnan().any()


def test_checkpoint_of_another_model(tmp_path):
    run_here(tmp_path, epochs=1, warmup_epochs=0)
    wide = {'model_kwargs': {'embed_dim': 64, 'depth': 2, 'num_heads': 2, 'patch_size': 2, 'feature_dim': 8}}
    with pytest.raises(InputError, match='is a checkpoint of another model'):
        build_model(small_config(initial_checkpoint=str(tmp_path / 'last.pt'), **wide))
    with pytest.raises(InputError, match='checkpoint of another model: .* weights differ, the first is'):
        validate(small_config(**wide), ONE, str(tmp_path / 'last.pt'))
    with pytest.raises(InputError, match='no checkpoint file'):
        build_model(small_config(initial_checkpoint='none.pth'))
    (tmp_path / 'text.pth').write_text('not a checkpoint', encoding='utf-8')
    with pytest.raises(InputError, match='cannot read checkpoint'):
        build_model(small_config(initial_checkpoint=str(tmp_path / 'text.pth')))
