import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention

from nprf_vit.layers import KERNELS, KernelAttention, RelPosBias, expand_table
from nprf_vit.ops import DecodeState, feature_map, kernel_attention
from nprf_vit.ops.plain import plain_attention

RANDOM = [k for k in KERNELS if k != 'softmax']


def oracle(layer, x, table=None):
    """The layer from its equations, in float64, with every weight stored."""
    batch, n = x.shape[0], x[0, ..., 0].numel()
    qkv = F.linear(x.reshape(batch, n, -1), layer.qkv.weight, layer.qkv.bias)
    q, k, v = qkv.reshape(batch, n, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    d = layer.head_dim
    if layer.normalize:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    else:
        q, k = q / d**0.25, k / d**0.25
    if layer.kernel == 'softmax':
        score = (q @ k.transpose(-1, -2)).exp()
    elif layer.kernel == 'elu':
        score = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)
    else:

        def phi(t):
            p = t @ layer.w.double().transpose(-1, -2)
            square = t.square().sum(-1, keepdim=True) / 2
            if layer.kernel == 'trf':
                return square.exp() * torch.cat([p.sin(), p.cos()], -1)
            return (p - square).exp()

        score = phi(q) @ phi(k).transpose(-1, -2)
    if table is not None:
        score = score * expand_table(table, x.shape[1:-1]).exp()
    if layer.causal:
        score = score.tril()
    z = (score / score.sum(-1, keepdim=True)) @ v
    return F.linear(z.transpose(1, 2).reshape(x.shape), layer.proj.weight, layer.proj.bias)


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('shape', [(3, 4), (7,)])
def test_every_variant_is_its_equation(kernel, normalize, shape):
    layer = KernelAttention(16, 2, kernel, normalize, feature_dim=8, rel_pos_size=shape).double()
    with torch.no_grad():
        layer.rel_pos_bias.table.normal_()
    x = torch.randn(2, *shape, 16, dtype=torch.float64)
    expected = oracle(layer, x, layer.rel_pos_bias.table)
    torch.testing.assert_close(layer(x), expected)
    flipped = oracle(layer, x, layer.rel_pos_bias.table.flip(1))
    assert not torch.allclose(flipped, expected, atol=1e-3)
    without = KernelAttention(16, 2, kernel, normalize, feature_dim=8).double()
    without.load_state_dict({k: v for k, v in layer.state_dict().items() if 'rel_pos' not in k})
    torch.testing.assert_close(without(x), oracle(without, x))


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
def test_gradients_of_every_variant(kernel, normalize):
    layer = KernelAttention(8, 2, kernel, normalize, feature_dim=4, rel_pos_size=(2, 3)).double()
    x = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    parameters = [x, *layer.parameters()]
    target = torch.randn_like(x)
    expected = torch.autograd.grad((oracle(layer, x, layer.rel_pos_bias.table) * target).sum(), parameters)
    got = torch.autograd.grad((layer(x) * target).sum(), parameters)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('kernel', KERNELS)
def test_causal_never_looks_ahead(kernel):
    layer = KernelAttention(16, 2, kernel, feature_dim=8, rel_pos_size=(9,), causal=True).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), oracle(layer, x, layer.rel_pos_bias.table))
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(layer(changed)[:, :5], layer(x)[:, :5])
    assert not torch.allclose(layer(changed)[:, 5:], layer(x)[:, 5:])
    bare = KernelAttention(16, 2, kernel).double()
    torch.testing.assert_close(bare(x, is_causal=True)[:, :5], bare(changed, is_causal=True)[:, :5])


def test_decoding_token_by_token():
    layer = KernelAttention(16, 2, feature_dim=8, rel_pos_size=(7,), causal=True).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    state = DecodeState(layer.rel_pos_bias().table, max_len=7)
    outs = []
    with torch.no_grad():
        for t in range(7):
            q, k, v = layer.project(x[:, t : t + 1])
            phi_q, phi_k = layer.features(q, k, causal=True)
            outs.append(state.step(phi_q[:, :, 0], phi_k[:, :, 0], v[:, :, 0]).flatten(1))
        torch.testing.assert_close(layer.proj(torch.stack(outs, 1)), layer(x))


def test_softmax_is_timms_attention():
    theirs = Attention(32, 4, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    ours = KernelAttention(32, 4, 'softmax', normalize=False, qk_norm=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 10, 32)
    torch.testing.assert_close(ours(x), theirs(x))


def test_grid_and_sequence_are_one_layer():
    layer = KernelAttention(16, 2, rel_pos_size=(3, 4))
    x = torch.randn(2, 3, 4, 16)
    torch.testing.assert_close(layer(x.flatten(1, 2)), layer(x).flatten(1, 2))


def test_a_shared_bias_is_handed_in():
    for kernel in ('prf', 'softmax'):
        own = KernelAttention(16, 2, kernel, rel_pos_size=(3, 4))
        shared = KernelAttention(16, 2, kernel)
        shared.load_state_dict(own.state_dict(), strict=False)
        bias = RelPosBias((3, 4), 2, dense=kernel == 'softmax')
        bias.load_state_dict(own.rel_pos_bias.state_dict())
        x = torch.randn(2, 3, 4, 16)
        torch.testing.assert_close(shared(x, bias()), own(x))
        with pytest.raises(ValueError, match='of its own'):
            own(x, bias())


def test_another_grid_resizes_the_own_table():
    layer = KernelAttention(16, 2, rel_pos_size=(3, 3)).double()
    x = torch.randn(1, 5, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), oracle(layer, x, layer.rel_pos_bias((5, 2)).table))


def test_projection_depends_on_seed_and_depth_only():
    draws = {}
    for seed, depth in ((0, 0), (0, 1), (1, 0)):
        torch.manual_seed(seed + depth)
        draws[seed, depth] = KernelAttention(16, 2, seed=seed, depth=depth).w
        torch.manual_seed(7)
        assert torch.equal(draws[seed, depth], KernelAttention(16, 2, seed=seed, depth=depth).w)
    assert not torch.equal(draws[0, 0], draws[0, 1]) and not torch.equal(draws[0, 0], draws[1, 0])
    state = torch.get_rng_state()
    KernelAttention(16, 2).reset_parameters()
    torch.manual_seed(0)
    a = KernelAttention(16, 2, 'softmax').qkv.weight
    torch.manual_seed(0)
    assert torch.equal(KernelAttention(16, 2, 'prf').qkv.weight, a), 'the draw must not touch the global generator'
    torch.set_rng_state(state)


def test_projection_is_float32_whatever_the_weights_are():
    assert KernelAttention(16, 2, dtype=torch.bfloat16).w.dtype == torch.float32
    assert 'w' in KernelAttention(16, 2).state_dict()
    assert KernelAttention(16, 2, 'elu').w is None


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(kernel, normalize, dtype):
    layer = KernelAttention(16, 2, kernel, normalize, rel_pos_size=(4, 4)).eval()
    x = torch.randn(2, 4, 4, 16)
    expected = layer(x)
    scale = expected.abs().max().item()
    with torch.autocast('cpu', dtype=dtype):
        out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.03 * scale, rtol=0)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype and (layer.w is None or layer.w.dtype == dtype)
    torch.testing.assert_close(out.float(), expected, atol=0.06 * scale, rtol=0)


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_zero_queries_stay_finite(kernel, normalize, dtype):
    layer = KernelAttention(16, 2, kernel, normalize, rel_pos_size=(3, 3)).to(dtype)
    torch.nn.init.zeros_(layer.qkv.weight)
    torch.nn.init.zeros_(layer.qkv.bias)
    x = torch.randn(1, 3, 3, 16, dtype=dtype, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize('kernel', RANDOM)
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('sharp', [False, True])
def test_plain_operators_equal_the_op(kernel, causal, sharp):
    x = torch.randn(2, 3, 12, 8)
    w = torch.randn(3, 16, 8)
    phi_q, phi_k = (feature_map(x, w, kind=kernel, role=r, causal=causal) for r in ('query', 'key'))
    v = torch.randn(2, 3, 12, 5)
    grid_size = None if causal else (3, 4)
    table = torch.randn(3, 23) if causal else torch.randn(3, 5, 7)
    table = table * 20 if sharp else table
    for bias in (None, table):
        options = {'bias': bias, 'grid_size': grid_size, 'causal': causal}
        expected = kernel_attention(phi_q, phi_k, v, positive=kernel != 'trf', backend='direct', **options)
        # signed features may nearly cancel in a denominator: compare where they do not
        got = plain_attention(phi_q, phi_k, v, positive=kernel != 'trf', **options)
        mask = expected.abs() < 20
        assert mask.float().mean() > 0.8
        torch.testing.assert_close(got[mask], expected[mask], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'kernel': 'gauss'}, "unknown kernel 'gauss': expected one of prf, orf, sphere, trf, elu, softmax"),
        ({'attn_backend': 'cuda'}, "unknown attn_backend 'cuda'"),
        ({'num_heads': 3}, 'dim 16 is not divisible by num_heads 3'),
        ({'attn_drop': 0.1}, "attn_drop 0.1 needs attention weights, which kernel 'prf' never forms"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KernelAttention(16, **{'num_heads': 2, **kwargs})


@pytest.mark.parametrize('kernel', ['prf', 'softmax'])
def test_the_size_of_the_bias_is_refused_under_its_own_name(kernel):
    with pytest.raises(
        ValueError, match=r'^rel_pos_size 14: expected \(H, W\) or \(N,\).*such as \(14, 14\) or \(14,\)'
    ):
        KernelAttention(16, 2, kernel, rel_pos_size=14)
    with pytest.raises(ValueError, match=r'^rel_pos_size \(0, 3\)'):
        KernelAttention(16, 2, kernel, rel_pos_size=(0, 3))


def test_bad_inputs():
    layer = KernelAttention(16, 2, rel_pos_size=(3, 3))
    with pytest.raises(ValueError, match='8 tokens do not fill the 3x3 grid'):
        layer(torch.randn(1, 8, 16))
    with pytest.raises(ValueError, match='between queries and keys is not supported'):
        layer(torch.randn(1, 3, 3, 16), attn_mask=torch.ones(9, 9))
    with pytest.raises(ValueError, match='causal attention needs an order'):
        layer(torch.randn(1, 3, 3, 16), is_causal=True)
    with pytest.raises(ValueError, match=r'expected \(B, H, W, C\) or \(B, N, C\)'):
        layer(torch.randn(9, 16))


def test_a_backend_without_cells_says_so_on_a_sequence():
    layer = KernelAttention(16, 2, feature_dim=8, rel_pos_size=(4,), rel_pos_extend='cells', attn_backend='fused')
    with pytest.raises(ValueError, match="'fused' cannot serve.*between 1x4 cells"):
        layer(torch.randn(1, 8, 16))
