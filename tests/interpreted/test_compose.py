"""The fused ops inside what PyTorch wraps around them: compile, export, checkpointing, autocast, DDP."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nprf_vit.layers import KernelAttention, RelPosBias
from tests.models.small import make

GRID = (2, 3)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    """Attention with its table: kernel 'prf' goes through the packed op, 'elu' through features and values."""

    def __init__(self, kernel='prf', extend=False, backend='fused'):
        super().__init__()
        torch.manual_seed(3)
        self.attn = KernelAttention(32, 2, kernel=kernel, feature_dim=8, attn_backend=backend)
        self.table = RelPosBias((2, 2) if extend else GRID, 2, extend='extend' if extend else 'interpolate')
        for parameter in self.table.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):  # B, H, W, C
        return self.attn(x, self.table(GRID))


KINDS = {'packed': {}, 'window': {'extend': True}, 'features': {'kernel': 'elu'}}
FEW = ['packed', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('window', 'features'))]


def tokens(batch=2):
    return torch.randn(batch, *GRID, 32, generator=torch.Generator().manual_seed(4))


def gradients(function, module, x):
    module.zero_grad(set_to_none=True)
    function(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'nprf_vit':
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize('kind', FEW)
def test_opcheck(kind):
    """Schema, fake tensors, autograd registration, and the same under AOT dispatch."""
    module = Layer(**KINDS[kind])
    with Recorder() as recorder:
        module(tokens(1)).square().mean().backward()
    names = {function._opname for function, _, _ in recorder.calls}
    assert names == ({'fused', 'fused_backward'} if kind == 'features' else {'fused_qkv', 'fused_qkv_backward'})
    for function, args, kwargs in recorder.calls:
        plain = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        if not function._opname.endswith('backward'):
            plain = [a.requires_grad_() if isinstance(a, torch.Tensor) and i != 1 else a for i, a in enumerate(plain)]
        torch.library.opcheck(function, tuple(plain), kwargs)


@pytest.mark.parametrize('kind', KINDS)
def test_compile_in_one_graph(kind):
    module, x = Layer(**KINDS[kind]), tokens(1)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(module, fullgraph=True, backend=keep)(x), module(x))
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum('nprf_vit.fused' in name for name in names) == 1
    assert not any(name in ('item', 'tolist', 'cpu', 'nonzero') for name in names)
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    expected = gradients(module, module, x)
    for name, g in gradients(compiled, module, x).items():
        torch.testing.assert_close(g, expected[name], msg=name)


def test_a_model_has_no_graph_break():
    """Each layer one op, so that the graph of `torch.compile(mode='reduce-overhead')` is one CUDA graph."""
    model, image = make(depth=2, attn_backend='fused').train(), torch.randn(1, 3, 64, 64)
    explained = torch._dynamo.explain(model)(image)
    assert explained.graph_break_count == 0 and explained.graph_count == 1
    names = [str(node.target) for node in explained.graphs[0].graph.nodes]
    assert sum('nprf_vit.fused_qkv' in name for name in names) == 2
    assert not any('nprf_vit.attend' in name for name in names)


@pytest.mark.slow
def test_inductor():
    module, x = Layer(), tokens()
    compiled = torch.compile(module, fullgraph=True, mode='reduce-overhead')
    torch.testing.assert_close(compiled(x), module(x))
    expected = gradients(module, module, x)
    for name, g in gradients(compiled, module, x).items():
        torch.testing.assert_close(g, expected[name], msg=name)


@pytest.mark.parametrize('kind', FEW)
def test_export_with_a_dynamic_batch(kind):
    module = Layer(**KINDS[kind]).eval()
    dims = {'x': {0: torch.export.Dim('batch', min=1, max=64)}}
    program = torch.export.export(module, (tokens(3),), dynamic_shapes=dims)
    graphs = [x for x in program.graph_module.modules() if isinstance(x, torch.fx.GraphModule)]
    assert sum('nprf_vit.fused' in str(node.target) for graph in graphs for node in graph.graph.nodes) == 1
    for batch in (1, 2):
        torch.testing.assert_close(program.module()(tokens(batch)), module(tokens(batch)))


@pytest.mark.parametrize('use_reentrant', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_activation_checkpointing(use_reentrant):
    module, x = Layer(), tokens(1).requires_grad_()
    expected = gradients(module, module, x)
    actual = gradients(lambda x: checkpoint(module, x, use_reentrant=use_reentrant), module, x)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize('kind', FEW)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(kind, dtype):
    """The op gets what the projection returns, half precision; parameters get float32 gradients."""
    module, x = Layer(**KINDS[kind]), tokens(1)
    with Recorder() as recorder, torch.autocast('cpu', dtype):
        z = module(x)
    function, args, _ = recorder.calls[0]
    assert z.dtype == dtype and args[2 if kind == 'features' else 0].dtype == dtype
    expected = Layer(**KINDS[kind], backend='direct')(x)
    assert (z - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    z.float().square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())


def test_deterministic_algorithms_do_not_raise():
    torch.use_deterministic_algorithms(True)
    runs = [gradients(module, module, tokens(1)) for module in (Layer(), Layer())]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]), name


def train_rank(rank, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{directory}/store', rank=rank, world_size=2)
    module = Layer()
    ddp = DistributedDataParallel(module)
    # the mean over ranks of each rank's mean is the mean over the batch
    ddp(tokens(4).chunk(2)[rank]).square().mean().backward()
    torch.save({name: p.grad for name, p in module.named_parameters()}, f'{directory}/{rank}.pt')
    torch.distributed.destroy_process_group()


def test_ddp(tmp_path):
    torch.multiprocessing.spawn(train_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f'{rank}.pt') for rank in range(2))
    module = Layer()
    for name, g in gradients(module, module, tokens(4)).items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], g, rtol=1e-4, atol=1e-6)
