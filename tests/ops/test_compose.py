"""`kernel_attention` inside what PyTorch wraps around it: compile, export, checkpointing, functional_call, DDP."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nprf_vit.ops import draw_projection, feature_map, kernel_attention

from .compare import make_case

BACKENDS = ['direct', 'fft', 'auto', 'linear']


class Attend(nn.Module):
    """The smallest layer: projections, features, bias table, attention."""

    def __init__(self, backend='auto', grid_size=(3, 4), causal=False, far=False, cells=None):
        super().__init__()
        self.backend, self.grid_size, self.causal, self.cells = backend, grid_size, causal, cells
        generator = torch.Generator().manual_seed(2)
        n = 12
        shape = (2, 2 * n - 1) if grid_size is None else (2, 2 * grid_size[0] - 1, 2 * grid_size[1] - 1)
        if cells is not None:
            shape = (2, 2 * cells[0] - 1, 2 * cells[1] - 1)
        if far:
            shape = (2, *(3 for _ in shape[1:]))
        self.qkv = nn.Parameter(torch.randn(3, 4, 8, generator=generator) / 2)
        self.bias = None if backend == 'linear' else nn.Parameter(torch.randn(shape, generator=generator))
        self.far = nn.Parameter(torch.randn(2, generator=generator)) if far else None
        self.register_buffer('w', draw_projection(2, 5, 4))

    def forward(self, x):  # B, 12, 4
        q, k, v = (x @ self.qkv.flatten(0, 1).view(3, 4, 8)[i] for i in range(3))  # B, N, 8
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))  # B, K, N, D
        phi_q = feature_map(q, self.w, role='query', causal=self.causal)
        phi_k = feature_map(k, self.w, role='key', causal=self.causal)
        options = {'grid_size': self.grid_size, 'causal': self.causal, 'backend': self.backend, 'cells': self.cells}
        return kernel_attention(phi_q, phi_k, v, self.bias, self.far, **options)


def tokens(batch=2):
    return torch.randn(batch, 12, 4, generator=torch.Generator().manual_seed(4))


def parameter_gradients(function, module, x):
    module.zero_grad(set_to_none=True)
    function(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_all_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda m: f'{name}: {m}')  # noqa: B023


SHAPES = {'grid': {}, 'causal': {'grid_size': None, 'causal': True}, 'far': {'far': True}}
# linear takes no bias
SERVED = [(backend, shape) for backend in BACKENDS for shape in SHAPES if (backend, shape) != ('linear', 'far')]
SHAPES['cells'] = {'cells': (2, 3)}
SERVED += [(backend, 'cells') for backend in ('cells', 'direct', 'auto')]


# torch.compile


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_compile_traces_one_graph(backend, shape):
    torch.compiler.reset()
    module, x = Attend(backend, **SHAPES[shape]), tokens()
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
    assert_all_close(parameter_gradients(compiled, module, x), parameter_gradients(module, module, x))


def test_compile_with_inductor():
    torch.compiler.reset()
    module, x = Attend('auto'), tokens()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
    assert_all_close(parameter_gradients(compiled, module, x), parameter_gradients(module, module, x))


def test_compile_with_a_dynamic_batch():
    torch.compiler.reset()
    module = Attend('auto')
    compiled = torch.compile(module, fullgraph=True, backend='eager', dynamic=True)
    for batch in (2, 5, 1):
        x = tokens(batch)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


def test_compile_follows_the_values_of_the_bias():
    """`fft` decides by the bias's values who computes; a compiled graph may not freeze that decision."""
    torch.compiler.reset()
    module, x = Attend('fft'), tokens()
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    compiled(x)
    for peak in (30.0, 80.0, 0.0):
        with torch.no_grad():
            module.bias[:, 0, 0] = peak
        direct = Attend('direct')
        direct.load_state_dict(module.state_dict())
        torch.testing.assert_close(compiled(x), direct(x), rtol=1e-4, atol=1e-4)


def test_compile_under_autocast():
    torch.compiler.reset()
    module, x = Attend('auto'), tokens()
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    with torch.autocast('cpu', torch.bfloat16):
        expected, actual = module(x), compiled(x)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


# torch.export


@pytest.mark.parametrize(('backend', 'shape'), SERVED)
def test_export_with_a_dynamic_batch(backend, shape):
    module = Attend(backend, **SHAPES[shape]).eval()
    program = torch.export.export(
        module, (tokens(3),), dynamic_shapes={'x': {0: torch.export.Dim('batch', min=1, max=64)}}
    )
    for batch in (1, 2, 7):
        x = tokens(batch)
        torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-6)


def test_export_survives_saving():
    module = Attend('auto').eval()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / 'attend.pt2'
        torch.export.save(torch.export.export(module, (tokens(),)), path)
        loaded = torch.export.load(path).module()
    torch.testing.assert_close(loaded(tokens()), module(tokens()), rtol=1e-5, atol=1e-6)


# Custom ops keep their promises: schema, fake tensors, autograd registration, and the same under AOT dispatch.


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('shape', [{'grid_size': (3, 4)}, {'n': 7, 'causal': True}], ids=['grid', 'causal'])
def test_opcheck(backend, shape):
    case = make_case(**shape, std=None if backend == 'linear' else 0.5, dtype=torch.float32)
    _opcheck(case, backend)


@pytest.mark.parametrize('backend', ['cells', 'direct'])
@pytest.mark.parametrize('shape', [{'grid_size': (3, 4), 'cells': (2, 3)}, {'n': 7, 'cells': 3}], ids=['grid', 'n'])
def test_opcheck_with_cells(backend, shape):
    _opcheck(make_case(**shape, dtype=torch.float32), backend)


def _opcheck(case, backend):
    recorded = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == 'nprf_vit':
                recorded.append((function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    case = case.map(lambda t: t.requires_grad_())
    with Recorder():
        case.run(backend).square().sum().backward()
    assert {f._opname for f, _, _ in recorded} >= {'attend', 'attend_backward'}
    for function, args, kwargs in recorded:
        detached = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        if function._opname == 'attend':
            detached = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in detached]
        torch.library.opcheck(function, tuple(detached), kwargs)


# Checkpointing, functional_call


@pytest.mark.parametrize('use_reentrant', [False, True])
@pytest.mark.parametrize('backend', BACKENDS)
def test_activation_checkpointing(backend, use_reentrant):
    module, x = Attend(backend), tokens().requires_grad_()
    expected = parameter_gradients(module, module, x)
    actual = parameter_gradients(lambda x: checkpoint(module, x, use_reentrant=use_reentrant), module, x)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize('backend', BACKENDS)
def test_functional_call(backend):
    module, x = Attend(backend), tokens()
    other = {name: (p + 0.1).detach().requires_grad_() for name, p in module.named_parameters()}
    z = torch.func.functional_call(module, other, (x,))
    z.square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    module.load_state_dict({**module.state_dict(), **{name: p.detach() for name, p in other.items()}})
    assert torch.equal(z, module(x))
    expected = parameter_gradients(module, module, x)
    for name, p in other.items():
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize('backend', BACKENDS)
def test_inference_mode(backend):
    module, x = Attend(backend), tokens()
    expected = module(x)
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


def test_meta_tensors_have_the_right_shape():
    """Shapes and operation counts of large models are inferred on the meta device."""
    case = make_case(grid_size=(3, 4), dtype=torch.float32)
    z = case.map(lambda t: t.to('meta')).run('auto')
    assert z.shape == case.v.shape
    assert z.device.type == 'meta'


# DDP


def train_rank(rank, world_size, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{directory}/store', rank=rank, world_size=world_size
    )
    x = tokens(4).chunk(world_size)[rank]
    for backend in ('direct', 'fft'):
        module = Attend(backend)
        ddp = DistributedDataParallel(module)
        # the mean over ranks of each rank's mean is the mean over the batch
        ddp(x).square().mean().backward()
        torch.save({name: p.grad for name, p in module.named_parameters()}, f'{directory}/{backend}{rank}.pt')
    torch.distributed.destroy_process_group()


def test_ddp(tmp_path):
    torch.multiprocessing.spawn(train_rank, (2, str(tmp_path)), nprocs=2)
    for backend in ('direct', 'fft'):
        first, second = (torch.load(tmp_path / f'{backend}{rank}.pt') for rank in range(2))
        module = Attend(backend)
        module(tokens(4)).square().mean().backward()
        for name, p in module.named_parameters():
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], p.grad, rtol=1e-4, atol=1e-6)


# Determinism


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize(
    ('shape', 'backend'),
    [
        *(({'grid_size': (17, 16)}, backend) for backend in ('direct', 'fft', 'auto')),
        *(({'n': 300, 'causal': True}, backend) for backend in ('direct', 'fft', 'auto')),
        *(({'grid_size': (17, 16), 'cells': (5, 6)}, backend) for backend in ('direct', 'cells')),
    ],
)
def test_gradients_are_bitwise_reproducible(shape, backend, batch):
    case = make_case(**shape, batch=batch, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)  # conftest sets it back
    runs = []
    for _ in range(3):
        leaves = case.map(lambda t: t.clone().requires_grad_())
        leaves.run(backend).square().sum().backward()
        runs.append([t.grad for t in leaves.tensors().values()])
    for again in runs[1:]:
        for first, second in zip(runs[0], again):
            assert torch.equal(first, second)


@pytest.mark.parametrize('backend', BACKENDS)
def test_deterministic_algorithms_do_not_raise(backend):
    torch.use_deterministic_algorithms(True)
    module = Attend(backend)
    parameter_gradients(module, module, tokens())
