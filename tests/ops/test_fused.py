"""The fused ops where Triton does not run: choice, fakes, gradients' shapes, the check, FLOPs. No kernel runs."""

import warnings

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.layers import KernelAttention, RelPosBias
from nprf_vit.layers import attention as layer_module
from nprf_vit.ops import choose_backend, kernel_attention
from nprf_vit.ops.backends import fused, fused_check, fused_plain, fused_support
from nprf_vit.ops.backends.fused_qkv import fused_qkv
from nprf_vit.ops.backends.interface import Case
from nprf_vit.ops.dispatch import BACKENDS, choose
from nprf_vit.ops.features import draw_projection, feature_map
from tests.fake_cuda import needs_fake_cuda

triton = pytest.importorskip('triton')
needs_no_interpreter = pytest.mark.skipif(fused_support.INTERPRETED, reason='Triton interprets in this process')


@needs_no_interpreter
def test_on_the_cpu_it_says_why_not():
    x = torch.rand(1, 1, 4, 2)
    with pytest.raises(ValueError, match='TRITON_INTERPRET'):
        kernel_attention(x, x, x, backend='fused')


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(fused_support, 'AVAILABLE', False)
    x = torch.rand(1, 1, 4, 2)
    with pytest.raises(ValueError, match='Triton is not installed'):
        kernel_attention(x, x, x, backend='fused')


@pytest.mark.parametrize('backend', ['auto', 'fused'])
def test_cuda_takes_the_kernels(backend):
    with FakeTensorMode():
        phi = torch.empty(2, 3, 35, 8, device='cuda')
        v = torch.empty(2, 3, 35, 16, device='cuda', dtype=torch.bfloat16)
        bias = torch.empty(3, 9, 13, device='cuda')
        z = kernel_attention(phi, phi, v, bias, grid_size=(5, 7), backend=backend)
        assert z.shape == v.shape and z.dtype == v.dtype and z.device == v.device
    case = Case((5, 7), 8, 16, device='cuda', v_dtype=torch.bfloat16)
    assert choose(case).name == 'fused'
    assert choose(case._replace(causal=True, has_bias=False)).name == 'linear'
    assert choose(case._replace(v_dtype=torch.float64, feature_dtype=torch.float64)).name == 'direct'
    assert choose(case._replace(d=160)).name == 'direct'


def test_the_cost_model_by_device():
    assert choose_backend((14, 14), 32, 64, False, True, device='cuda') == 'fused'
    assert choose_backend((14, 14), 32, 64, False, False, device='cuda') == 'fused'
    assert choose_backend((1, 64), 32, 64, True, False, device='cuda') == 'linear'
    assert choose_backend((14, 14), 32, 64, False, True) == 'direct'


@pytest.mark.parametrize('case', ['grid', 'window', 'causal', 'none'])
def test_shapes_of_the_gradients(case):
    """On the meta device, where the fakes run: autograd's engine has no fake CUDA."""
    shape = {'grid': (2, 5, 7), 'window': (2, 3, 3), 'causal': (2, 1, 23), 'none': None}[case]
    grid = (1, 12) if case == 'causal' else (3, 4)
    with torch.device('meta'):
        qkv = torch.empty(2, 12, 3, 2, 16, requires_grad=True)
        bias = None if shape is None else torch.empty(shape, requires_grad=True)
        far = torch.empty(2, requires_grad=True) if case == 'window' else None
        z = fused_qkv(qkv, torch.empty(2, 8, 16), bias, far, *grid, case == 'causal')[0]
        phi, v = torch.empty(2, 2, 12, 8, requires_grad=True), torch.empty(2, 2, 12, 16, requires_grad=True)
        y = fused.fused(phi, phi, v, bias, far, *grid, case == 'causal', True)[0]
    assert z.shape == (2, 12, 2, 16) and y.shape == v.shape
    for out, own in ((z, [qkv]), (y, [phi, v])):
        inputs = [x for x in (*own, bias, far) if x is not None]
        for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs)):
            assert g.shape == x.shape and g.dtype == x.dtype


@needs_fake_cuda
@pytest.mark.parametrize(
    ('extend', 'pixels', 'fused_layers'),
    [
        ('interpolate', 64, 2),
        ('interpolate', 96, 2),
        ('extend', 64, 2),
        ('extend', 96, 2),
        ('cells', 64, 2),
        ('cells', 96, 0),
    ],
)
def test_a_model_on_fake_cuda_reads_nothing_on_the_host(extend, pixels, fused_layers, monkeypatch):
    """On its own grid and on a larger one; each layer is one op, whose kernels read nothing either.

    The kernels do not serve a bias between cells: plain products do.
    """
    model = timm.create_model(
        'nprf_deit_tiny', img_size=64, depth=2, rel_pos_extend=extend, dynamic_img_size=True
    ).eval()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    seen = []
    packed = layer_module.packed_attention
    monkeypatch.setattr(layer_module, 'packed_attention', lambda *args: seen.append(args) or packed(*args))
    with FakeTensorMode(), torch.no_grad():
        fake = {name: torch.empty(x.shape, dtype=x.dtype, device='cuda') for name, x in state.items()}
        image = torch.empty(2, 3, pixels, pixels, device='cuda')
        assert torch.func.functional_call(model, fake, image).shape == (2, 1000)
    assert len(seen) == fused_layers


def test_the_layer_differentiates_through_the_packed_op(monkeypatch):
    monkeypatch.setattr(layer_module, 'packed_backend', lambda *args: BACKENDS['fused'].run)
    with torch.device('meta'):
        layer, table = KernelAttention(32, 2, feature_dim=8), RelPosBias((3, 4), 2)
        x = torch.empty(2, 3, 4, 32, requires_grad=True)
        z = layer(x, table())
    z.sum().backward()
    assert x.grad.shape == x.shape and table.table.grad.shape == table.table.shape
    assert layer.qkv.weight.grad is not None


def test_plain_features_and_their_gradient():
    """What stands in for the kernels where they are not trusted."""
    x = torch.randn(2, 3, 7, 5, dtype=torch.float32, requires_grad=True)
    w = draw_projection(3, 6, 5)
    phi = feature_map(x, w, role='key', normalize=True)
    d_phi = torch.randn_like(phi)
    (expected,) = torch.autograd.grad(phi, x, d_phi)
    mine = fused_plain.features_plain_backward(x.detach(), w, phi.detach(), d_phi)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


class _Problem:
    bias, causal, positive, grid, precision = 'full', False, True, (3, 4), 'tf32'


class _Values:
    """Stands in for values on a GPU."""

    is_cuda, device, dtype, shape = True, torch.device('cuda', 0), torch.bfloat16, (1, 1, 12, 16)


def test_a_fault_is_told_once_and_remembered(monkeypatch):
    monkeypatch.delenv('NPRF_VIT_FUSED', raising=False)
    monkeypatch.setattr(fused_check, '_verdicts', {})
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    calls = []
    monkeypatch.setattr(fused_check, 'find_fault', lambda *args: calls.append(args) or 'z is off by 1')
    with pytest.warns(UserWarning, match='z is off by 1.*Plain PyTorch'):
        assert not fused_check.is_trusted(_Values, 8, _Problem)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not fused_check.is_trusted(_Values, 8, _Problem)
    assert len(calls) == 1


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch):
    monkeypatch.delenv('NPRF_VIT_FUSED', raising=False)
    monkeypatch.setattr(fused_check, '_verdicts', {})
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    monkeypatch.setattr(fused_check, 'find_fault', lambda *args: pytest.fail('checked'))
    assert fused_check.is_trusted(_Values, 8, _Problem)
    assert fused_check._verdicts == {}


def test_the_environment_decides(monkeypatch):
    monkeypatch.setattr(fused_check, 'find_fault', lambda *args: pytest.fail('checked'))
    for setting, expected in (('0', False), ('1', True)):
        monkeypatch.setenv('NPRF_VIT_FUSED', setting)
        assert fused_check.is_trusted(_Values, 8, _Problem) is expected


def test_a_launch_that_raises_is_a_fault(monkeypatch):
    def fail(*args):
        raise RuntimeError('no kernel image\nsecond line')

    monkeypatch.setattr(fused_check, '_errors', fail)
    reason = fused_check.find_fault(torch.device('cpu'), torch.float32, 8, 16, _Problem)
    assert reason == 'RuntimeError: no kernel image'
    monkeypatch.setattr(fused_check, '_errors', lambda *args: {'z': float('nan')})
    assert 'z is off' in fused_check.find_fault(torch.device('cpu'), torch.float32, 8, 16, _Problem)


def test_flops_of_the_ops():
    n, m, d = 12, 8, 16
    with torch.device('meta'):
        qkv, w = torch.empty(2, n, 3, 2, d, requires_grad=True), torch.empty(2, m, d)
        bias = torch.empty(2, 5, 7, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            fused_qkv(qkv, w, bias, None, 3, 4, False)[0].sum().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()['Global'].items()}
    assert counts['nprf_vit.fused_qkv'] == 2 * 4 * (n * n * (m + d + 1) + 2 * n * m * d)
    assert counts['nprf_vit.fused_qkv_backward'] == 2 * 4 * (n * n * (3 * m + 2 * d + 1) + 2 * n * m * d)
    phi, v = torch.rand(1, 2, 5, m, requires_grad=True), torch.rand(1, 2, 5, d)
    with FlopCounterMode(display=False) as counter:
        kernel_attention(phi, phi, v).sum().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()['Global'].items()}
    assert counts['nprf_vit.attend'] == 2 * 2 * 2 * 5 * m * (d + 1)
    assert counts['nprf_vit.attend_backward'] == 2 * 2 * 5 * 5 * m * (d + 1)
