import pytest
import timm
import torch

from nprf_vit.layers import KERNELS
from nprf_vit.models import KernelVisionTransformer

from .small import make

# weights trained by the optimizer; the random projections are buffers and come on top
PARAMETERS = {
    'nprf_deit_tiny': 5_681_587,
    'nprf_deit_small': 21_979_006,
    'nprf_deit_base': 86_424_340,
    'nprf_deit_base_384': 86_442_100,
    'nprf_deit_base_patch8': 86_009_524,
    'nprf_deit_base_patch32': 88_187_092,
    'nprf_deit_base_distilled': 87_194_972,
    'nprf_deit_large': 304_135_544,
    'nprf_deit_base_norpe': 86_566_120,
    'prf_deit_base': 86_566_120,
    'softmax_deit_base': 86_566_120,
}


def test_the_zoo_is_registered():
    assert set(timm.list_models(module='nprf_deit')) == set(PARAMETERS)
    assert all(timm.is_model(name) for name in PARAMETERS)
    with_weights = ['nprf_deit_tiny.digits', 'nprf_deit_tiny.fashion_mnist']  # test_shipped.py
    assert timm.list_models('*prf_deit*', pretrained=True) == with_weights


@pytest.mark.parametrize('name', PARAMETERS)
def test_number_of_parameters(name):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_parameters_are_those_of_deit_but_for_positions_and_class_token():
    with torch.device('meta'):
        deit = timm.create_model('deit_base_patch16_224')
    count = sum(p.numel() for p in deit.parameters())
    assert PARAMETERS['softmax_deit_base'] == count - 2 * 768
    assert PARAMETERS['nprf_deit_base'] == count - 768 - 197 * 768 + 12 * 27 * 27


@pytest.mark.parametrize(
    ('name', 'kernel', 'normalize', 'rel_pos'),
    [
        ('nprf_deit_tiny', 'prf', True, 'shared'),
        ('nprf_deit_small', 'prf', True, 'shared'),
        ('nprf_deit_base', 'prf', True, 'shared'),
        ('nprf_deit_base_norpe', 'prf', True, 'none'),
        ('prf_deit_base', 'prf', False, 'none'),
        ('softmax_deit_base', 'softmax', False, 'none'),
    ],
)
def test_entry_points_are_their_rows(name, kernel, normalize, rel_pos):
    with torch.device('meta'):
        model = timm.create_model(name)
    attn = model.blocks[0].attn
    assert isinstance(model, KernelVisionTransformer)
    assert (attn.kernel, attn.normalize, model.rel_pos) == (kernel, normalize, rel_pos)
    assert len(model.blocks) == 12 and attn.head_dim == 64 and attn.feature_dim == 32
    assert (model.pos_embed is None) == (rel_pos != 'none')
    assert model.cls_token is None and model.global_pool == 'avg'
    assert isinstance(model.norm, torch.nn.LayerNorm) and isinstance(model.fc_norm, torch.nn.Identity)


@pytest.mark.parametrize(
    ('name', 'width', 'depth', 'grid'),
    [
        ('nprf_deit_base_384', 768, 12, (24, 24)),
        ('nprf_deit_base_patch8', 768, 12, (28, 28)),
        ('nprf_deit_base_patch32', 768, 12, (7, 7)),
        ('nprf_deit_base_distilled', 768, 12, (14, 14)),
        ('nprf_deit_large', 1024, 24, (14, 14)),
    ],
)
def test_entry_points_of_other_sizes(name, width, depth, grid):
    with torch.device('meta'):
        model = timm.create_model(name)
    attn = model.blocks[0].attn
    assert (attn.kernel, attn.normalize, model.rel_pos, attn.head_dim) == ('prf', True, 'shared', 64)
    assert (model.embed_dim, len(model.blocks), model.patch_embed.grid_size) == (width, depth, grid)
    assert model.rel_pos_bias.grid_size == grid and model.pos_embed is None
    assert model.patch_embed.img_size == tuple(model.pretrained_cfg['input_size'][1:])


@pytest.mark.parametrize(
    ('kwargs', 'names'),
    [
        ({'init_values': 1e-6}, {'ls1.gamma', 'ls2.gamma'}),
        ({'qk_norm': True}, {'attn.q_norm.weight', 'attn.q_norm.bias', 'attn.k_norm.weight', 'attn.k_norm.bias'}),
        ({'scale_mlp_norm': True}, {'mlp.norm.weight', 'mlp.norm.bias'}),
        ({'drop_path_rate': 0.3, 'no_embed_class': True, 'class_token': True, 'proj_drop_rate': 0.1}, set()),
    ],
)
def test_arguments_of_timm_pass_through(kwargs, names, image):
    """DeiT-III's layer scale among them."""
    model, plain = make(**kwargs).train(), make()
    own = {k[len('blocks.0.') :] for k in model.state_dict().keys() - plain.state_dict().keys() if 'blocks.0.' in k}
    assert own == names
    if 'init_values' in kwargs:
        assert (model.blocks[2].ls2.gamma == 1e-6).all()
    if 'drop_path_rate' in kwargs:
        assert model.blocks[2].drop_path1.drop_prob == pytest.approx(0.3) and model.blocks[0].attn.proj_drop.p == 0.1
    model(image).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_full_size_forward():
    model = timm.create_model('nprf_deit_tiny').eval()
    with torch.no_grad():
        out = model(torch.randn(1, 3, 224, 224))
    assert out.shape == (1, 1000) and out.isfinite().all()


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('rel_pos', ['shared', 'layer', 'none'])
def test_every_variant_runs_and_trains(kernel, normalize, rel_pos, image):
    model = make(kernel=kernel, normalize=normalize, rel_pos=rel_pos, drop_path_rate=0.1).train()
    out = model(image)
    assert out.shape == (2, 5) and out.isfinite().all()
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    tables = [n for n, _ in model.named_parameters() if n.endswith('table')]
    assert len(tables) == {'shared': 1, 'layer': 3, 'none': 0}[rel_pos]


def test_the_bias_reaches_every_block(image):
    model = make()
    before = model.forward_intermediates(image, intermediates_only=True)
    with torch.no_grad():
        model.rel_pos_bias.table.normal_()
    after = model.forward_intermediates(image, intermediates_only=True)
    assert all(not torch.allclose(a, b) for a, b in zip(before, after))
    seen = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda module, args: seen.append(args[1].table.data_ptr()))
    model(image)
    assert len(seen) == 3 and len(set(seen)) == 1


def test_blocks_draw_different_projections_from_one_seed():
    a, b, c = make(), make(), make(seed=1)
    assert torch.equal(a.blocks[1].attn.w, b.blocks[1].attn.w)
    assert not torch.equal(a.blocks[1].attn.w, a.blocks[2].attn.w)
    assert not torch.equal(a.blocks[1].attn.w, c.blocks[1].attn.w)


def test_softmax_deit_with_class_token_is_timms_deit(image):
    small = {'embed_dim': 32, 'depth': 3, 'num_heads': 2, 'img_size': 64, 'num_classes': 5}
    theirs = timm.create_model('deit_base_patch16_224', **small).eval()
    ours = timm.create_model('softmax_deit_base', **small, class_token=True, global_pool='token').eval()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(image), theirs(image))
    ours.set_input_size((96, 48))
    theirs.set_input_size((96, 48))
    image = torch.randn(1, 3, 96, 48)
    torch.testing.assert_close(ours(image), theirs(image))
    for norm in (False, True):
        a, b = (m.forward_intermediates(image, norm=norm, return_prefix_tokens=True) for m in (ours, theirs))
        torch.testing.assert_close(a, b)


def test_tokens_off_the_grid(image):
    kwargs = {'rel_pos': 'none', 'class_token': True, 'reg_tokens': 2, 'global_pool': 'token', 'no_embed_class': True}
    assert make(**kwargs)(image).shape == (2, 5)
    assert make(**kwargs, dynamic_img_size=True)(torch.randn(1, 3, 32, 96)).shape == (1, 5)
    assert make(rel_pos='none', patch_drop_rate=0.5).train()(image).shape == (2, 5)


@pytest.mark.parametrize('backend', ['fft', 'auto'])
def test_the_fft_equals_direct_at_224_px(backend):
    kwargs = {'img_size': 224, 'num_heads': 4, 'feature_dim': 16}
    image, grads, outs = torch.randn(1, 3, 224, 224), [], []
    state = make(**kwargs).state_dict()
    for attn_backend in ('direct', backend):
        model = make(attn_backend=attn_backend, **kwargs)
        model.load_state_dict(state)
        outs.append(model(image))
        outs[-1].sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-4, rtol=1e-4, msg=name)


def test_the_fft_trains(image):
    torch.manual_seed(0)
    model = make(attn_backend='fft').train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    target, losses = torch.tensor([1, 3]), []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        ({'kernel': 'gauss'}, ValueError, "unknown kernel 'gauss': expected one of prf, orf"),
        ({'rel_pos': 'global'}, ValueError, "unknown rel_pos 'global': expected one of shared, layer, none"),
        ({'patch_drop_rate': 0.5}, ValueError, "rel_pos='shared' needs the whole grid: expected patch_drop_rate=0"),
        ({'img_size': 70}, ValueError, 'img_size 70x70 is not divisible by the patch size 16x16'),
        ({'pretrained': True}, RuntimeError, 'No pretrained weights exist for nprf_deit_base'),
        ({'attn_drop_rate': 0.1}, ValueError, 'attn_drop 0.1 needs attention weights'),
        ({'attn_backend': 'magic'}, ValueError, "unknown attn_backend 'magic'"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        make(**kwargs)


def test_bad_images():
    with pytest.raises(ValueError, match='image 72x64 is not divisible by the patch size 16x16'):
        make()(torch.randn(1, 3, 72, 64))
    with pytest.raises(ValueError, match='image 64x65 is not divisible by the patch size 16x16'):
        make(dynamic_img_size=True)(torch.randn(1, 3, 64, 65))
    with pytest.raises(ValueError, match='image 96x64 does not match img_size 64x64: call set_input_size'):
        make()(torch.randn(1, 3, 96, 64))
    with pytest.raises(ValueError, match='img_size 70x64 is not divisible'):
        make().set_input_size((70, 64))
