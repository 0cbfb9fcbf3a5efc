"""Off the CPU nothing is read on the host, forward or backward, whatever backend is asked for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nprf_vit.ops import custom_op, kernel_attention
from nprf_vit.ops.backends import batched, batched_tiles
from nprf_vit.ops.backends.interface import Case, Product
from nprf_vit.ops.dispatch import BACKENDS
from tests.fake_cuda import needs_fake_cuda
from tests.models.small import make as make_model

from .compare import check, make_case
from .host_reads import HostReadError, NoHostReads

PRODUCTS = sorted(name for name, entry in BACKENDS.items() if isinstance(entry.run, Product) and entry.run.batched)
FORCED = [name for name in PRODUCTS if name != 'cells']  # it asks its tensors where they are
SHAPES = {
    'grid': {'grid_size': (5, 6)},
    'sequence': {'n': 19},
    'causal': {'n': 19, 'causal': True},
    'window': {'grid_size': (9, 10)},
    'causal window': {'n': 19, 'causal': True},
    'none': {'n': 19, 'std': None},
    'causal, none': {'n': 300, 'std': None, 'causal': True},
}


def case_of(shape, dtype=torch.float32):
    case = make_case(**SHAPES[shape], dtype=dtype)
    if 'window' in shape:
        case.bias = case.bias[(slice(None), *(slice(s // 2 - 1, s // 2 + 2) for s in case.bias.shape[1:]))].contiguous()
        case.far = torch.randn(2, generator=torch.Generator().manual_seed(7)).to(dtype)
    return case


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """CPU tensors take the path of every other device; windows as small as the tests' have tiles."""
    monkeypatch.setattr(custom_op, '_is_batched', lambda v, backend: True)
    monkeypatch.setattr(batched_tiles, '_SIDE', 2)
    monkeypatch.setattr(batched_tiles, '_SEQUENCE_SIDE', 2)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('backend', ['auto', *FORCED])
def test_nothing_is_read(backend, shape, on_an_accelerator):
    case = case_of(shape)
    radius = (1, 1) if case.far is not None else None
    described = Case((1, 19), 6, 3, case.causal, case.bias is not None, radius)
    if backend != 'auto' and BACKENDS[backend].why_not(described) is not None:
        with pytest.raises(ValueError, match='cannot serve'):
            case.run(backend)
        return
    leaves = case.map(lambda t: t.requires_grad_())
    with NoHostReads() as mode:
        leaves.run(backend).square().sum().backward()
    assert {'attend', 'attend_backward', 'div', 'cat'} <= set(mode.seen)  # the ops were opened
    check(case, backend)  # and compute what they should


@pytest.mark.parametrize('backend', ['direct', 'fft', 'window'])
def test_a_read_is_noticed(backend):
    """The CPU's own path decides by values."""
    with pytest.raises(HostReadError), NoHostReads():
        case_of('window').run(backend)


def test_a_copy_to_the_host_is_noticed():
    with FakeTensorMode(), NoHostReads():
        x = torch.empty(3, device='cuda')
        x + 1
        with pytest.raises(HostReadError, match='between'):
            x.cpu()


@needs_fake_cuda
@pytest.mark.parametrize('backend', ['auto', *PRODUCTS])
def test_on_fake_cuda_tensors(backend):
    """No value exists there at all."""
    case = case_of('none' if backend == 'linear' else 'window')
    if backend == 'cells':
        case = make_case(grid_size=(5, 6), cells=(2, 3), dtype=torch.float32)
    with FakeTensorMode(), NoHostReads() as mode:
        fake = case.map(lambda t: torch.empty(t.shape, device='cuda'))
        assert kernel_attention(**fake.arguments(), backend=backend).device.type == 'cuda'
        if backend == 'auto':
            return
        # backward as the op runs it: autograd's engine has no thread for a GPU that is not there
        assert 'bmm' in mode.seen or 'matmul' in mode.seen
        bias = None if fake.bias is None else fake.bias.reshape(2, -1, fake.bias.shape[-1])
        inputs, grid = (fake.phi_q, fake.phi_k, fake.v, bias, fake.far), fake.grid_size or (1, fake.v.shape[2])
        z, den = batched.attend(*inputs, grid, False, True, fake.cells)
        batched.attend_backward(*inputs, z, den, z, grid, False, bias is not None, fake.cells)


@needs_fake_cuda
@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        {'rel_pos_extend': 'extend', 'rel_pos_size': 3},
        {'rel_pos': 'none'},
        {'class_token': True, 'reg_tokens': 2},
        {'class_token': True, 'rel_pos': 'layer', 'rel_pos_extend': 'cells', 'rel_pos_size': 2},
    ],
)
@pytest.mark.parametrize('backend', ['auto', 'direct'])
def test_a_model_moves_nothing_between_host_and_device(backend, kwargs):
    """What a CUDA graph could not capture either: the model's forward on fake CUDA tensors."""
    model = make_model(depth=1, attn_backend=backend, **kwargs)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with FakeTensorMode(), torch.no_grad():
        fake = {name: torch.empty(x.shape, dtype=x.dtype, device='cuda') for name, x in state.items()}
        image = torch.empty(2, 3, 64, 64, device='cuda')
        with NoHostReads():
            assert torch.func.functional_call(model, fake, image).shape == (2, 5)
