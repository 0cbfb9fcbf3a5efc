"""Models in plain operators: the same numbers, no operator of ours in a graph, and files that run without us."""

import pytest
import timm
import torch
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import nprf_vit
from nprf_vit.layers import KernelAttention

from . import test_pixel as pixel
from .small import make as make_model
from .standalone import run_alone

LAYER, NONE, SOFTMAX = {'rel_pos': 'layer'}, {'rel_pos': 'none'}, {'kernel': 'softmax'}
EXTEND = {'rel_pos_extend': 'extend', 'rel_pos_size': 3}
CELLS = {'rel_pos_extend': 'cells', 'rel_pos_size': 3}
CLIP = {'rel_pos_extend': 'clip', 'rel_pos_size': 3}
CLASS, REGISTERS = {'class_token': True}, {'class_token': True, 'reg_tokens': 2}
VARIANTS = [
    {},
    LAYER,
    NONE,
    SOFTMAX,
    EXTEND,
    CELLS,
    CLIP,
    CLASS,
    {**REGISTERS, **LAYER},
    {**CLASS, **NONE},
    {**CLASS, **EXTEND},
    {**REGISTERS, **CELLS},
    {**CLASS, **SOFTMAX},
    {'kernel': 'trf', 'normalize': False},
    {'kernel': 'elu'},
    {'normalize': False, **NONE},
    {'qk_norm': True},
]
DYNAMIC = [{}, NONE, EXTEND, CELLS, CLIP, LAYER, SOFTMAX, CLASS, {**CLASS, **EXTEND}, {**REGISTERS, **CELLS}]
# float32 against float32 in another order of sums: about 1e-6 of logits of size one, here ten times that and more
TOLERANCE = {'atol': 2e-5, 'rtol': 2e-5}


def name(kwargs):
    return '-'.join(f'{a}={b}' for a, b in kwargs.items()) or 'default'


def slow_but(first, kwargs):
    """The first in the default suite, all others in the slow one: a graph takes seconds to build."""
    return [pytest.param(k, marks=() if i < first else pytest.mark.slow, id=name(k)) for i, k in enumerate(kwargs)]


def make(**kwargs):
    """A model of one block whose logits are of size one."""
    model = make_model(**{'depth': 1, **kwargs})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if 'prefix' in key or key.endswith('far') or key == 'head.weight':
                parameter.normal_()
            elif key.endswith('qkv.weight'):
                parameter.mul_(10)
    return model


class Recorded(TorchDispatchMode):
    """Which operators run, and the most elements that any of them returns."""

    def __init__(self):
        super().__init__()
        self.namespaces, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.namespaces.add(func.namespace)
        for x in torch.utils._pytree.tree_leaves(out):
            self.largest = max(self.largest, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def recorded(model, *inputs):
    with Recorded() as record, torch.no_grad():
        model(*inputs)
    return record


@pytest.mark.parametrize('kwargs', VARIANTS, ids=name)
def test_plain_operators_give_the_same(kwargs, image):
    model = make(**kwargs)
    expected = model(image)
    assert expected.abs().mean() > 0.3
    model.set_exportable(True)
    torch.testing.assert_close(model(image), expected, **TOLERANCE)
    assert 'nprf_vit' not in recorded(model, image).namespaces
    model.set_exportable(False)
    assert torch.equal(model(image), expected)
    assert ('nprf_vit' in recorded(model, image).namespaces) == (model.kernel != 'softmax')


@pytest.mark.parametrize('kwargs', [{}, EXTEND, CELLS, NONE, REGISTERS, {**CLASS, **CELLS}, SOFTMAX], ids=name)
def test_a_mask_of_patches(kwargs, image):
    model = make(**kwargs)
    mask = torch.rand(2, 4, 4) < 0.6
    mask[1, :2] = False
    expected = model(image, attn_mask=mask)
    assert not torch.allclose(expected, model(image), **TOLERANCE)
    with model.set_exportable():
        torch.testing.assert_close(model(image, attn_mask=mask), expected, **TOLERANCE)


@pytest.mark.parametrize('kwargs', [k for k in pixel.VARIANTS if k.get('kernel') != 'softmax'], ids=name)
def test_pixel_models(kwargs):
    model, image = pixel.make(**kwargs), torch.randint(9, (2, 3, 4, 4))
    expected = model(image)
    with model.set_exportable():
        torch.testing.assert_close(model(image), expected, atol=1e-4, rtol=1e-4)
        assert 'nprf_vit' not in recorded(model, image).namespaces


def test_cross_attention():
    attn, x, context = KernelAttention(16, 2), torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    expected = attn(x, context=context, key_mask=mask)
    with nprf_vit.set_exportable(attn):
        torch.testing.assert_close(attn(x, context=context, key_mask=mask), expected)


@pytest.mark.parametrize('kwargs', [{}, {**REGISTERS, **EXTEND}, CELLS], ids=name)
def test_gradients_are_those_of_the_op(kwargs, image):
    model = make(depth=2, **kwargs).train()  # in the last block nobody asks for prefix tokens
    grads = []
    for exportable in (False, True):
        model.set_exportable(exportable)
        model.zero_grad()
        model(image).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for key, expected in grads[0].items():
        largest = expected.abs().max()
        torch.testing.assert_close(grads[1][key] / largest, expected / largest, **TOLERANCE, msg=key)
    assert grads[0]['blocks.0.attn.qkv.weight'].abs().max() > 1e-3


def test_the_context_restores_what_was_before():
    model = make(depth=2)
    model.blocks[1].attn.exportable = True
    with model.set_exportable():
        assert all(block.attn.exportable for block in model.blocks)
    assert [block.attn.exportable for block in model.blocks] == [False, True]
    with pytest.raises(KeyError), nprf_vit.set_exportable(model, False):
        assert not any(block.attn.exportable for block in model.blocks)
        raise KeyError
    assert [block.attn.exportable for block in model.blocks] == [False, True]


def test_the_argument_of_timm():
    assert make(exportable=True).blocks[0].attn.exportable
    assert not make().blocks[0].attn.exportable


def test_any_module_with_such_layers():
    twin = nprf_vit.convert(timm.create_model('vit_tiny_patch16_224', depth=1, img_size=32, num_classes=3)).eval()
    image = torch.randn(1, 3, 32, 32)
    expected = twin(image)
    with nprf_vit.set_exportable(twin):
        torch.testing.assert_close(twin(image), expected)
        assert 'nprf_vit' not in recorded(twin, image).namespaces
    with pytest.raises(ValueError, match='Linear without KernelAttention has no ops of this package'):
        nprf_vit.set_exportable(torch.nn.Linear(2, 2))


def test_bad_arguments_are_refused_by_the_same_words():
    attn = KernelAttention(16, 2)
    attn.exportable = True
    with pytest.raises(ValueError, match=r'bias \(2, 3, 3\) does not fit a 4x4 grid'):
        attn(torch.randn(1, 4, 4, 16), torch.randn(2, 3, 3))


@pytest.mark.parametrize('kwargs', [{}, NONE, EXTEND, CELLS, {**CLASS, **EXTEND}], ids=name)
def test_no_pair_of_tokens_is_stored_where_none_is_needed(kwargs, monkeypatch):
    """On 32×32 patches, 1024² = 1,048,576 pairs: of the graph's tensors only those of a bias by offset are so many."""
    model, image = make(patch_size=4, img_size=128, **kwargs), torch.randn(1, 3, 128, 128)
    with monkeypatch.context() as exporter:  # of ONNX, which asks nobody to set a model exportable
        exporter.setattr(torch.onnx, 'is_in_onnx_export', lambda: True)
        assert (recorded(model, image).largest >= 1024**2) == (kwargs == {})
    model.set_exportable()
    assert (recorded(model, image).largest >= 1024**2) == (kwargs == {})
    program = torch.export.export(model, (image,))
    values = [n.meta['val'] for n in program.graph.nodes if isinstance(n.meta.get('val'), torch.Tensor)]
    assert (max(x.numel() for x in values) >= 1024**2) == (kwargs == {})
    assert not any('nprf_vit' in str(n.target) for n in program.graph.nodes)


def dynamic_shapes(least=2):
    """Of a batch of images, of at least so many patches to a side."""
    height, width = Dim('height', min=least, max=64), Dim('width', min=least, max=64)
    return ({0: Dim('batch', min=1, max=64), 2: 16 * height, 3: 16 * width},)


def exported(model, least=2):
    return torch.export.export(model, (torch.randn(2, 3, 96, 80),), dynamic_shapes=dynamic_shapes(least))


def assert_alone(folder, model, *suffixes, sizes=((96, 80), (64, 64), (32, 128))):
    """Every file of the folder, run alone, gives what the ops of this package give, and notices another table."""
    model.set_exportable(False)
    inputs = [torch.randn(batch, 3, *size) for batch, size in zip((1, 3, 2), sizes)]
    outputs = run_alone(folder, *((x,) for x in inputs))
    assert set(outputs) == set(suffixes)
    for run in outputs.values():
        for x, out in zip(inputs, run):
            torch.testing.assert_close(out, model(x), **TOLERANCE)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.copy_(model.blocks[0].attn.qkv.weight.flip(0))
    assert not any(torch.allclose(run[0], model(inputs[0]), **TOLERANCE) for run in outputs.values())


@pytest.mark.parametrize('kwargs', slow_but(1, DYNAMIC))
def test_program_alone(kwargs, tmp_path):
    """`torch.export` with dynamic batch, height and width."""
    model = make(dynamic_img_size=True, **kwargs)
    model.set_exportable()
    program = exported(model)
    assert not any('nprf_vit' in str(n.target) for n in program.graph.nodes)
    torch.export.save(program, tmp_path / 'model.pt2')
    assert_alone(tmp_path, model, 'pt2')


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@pytest.mark.parametrize('kwargs', slow_but(1, [{}, NONE, EXTEND, CELLS, REGISTERS]))
def test_trace_and_onnx_alone(kwargs, tmp_path):
    """At the size that they were made at; the batch is dynamic."""
    model = make(**kwargs)
    model.set_exportable()
    image = torch.randn(2, 3, 64, 64)
    torch.jit.trace(model, image).save(tmp_path / 'model.ts')
    shapes = ({0: Dim('batch', min=1, max=64)},)
    torch.onnx.export(model, (image,), tmp_path / 'model.onnx', dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert_alone(tmp_path, model, 'ts', 'onnx', sizes=((64, 64),) * 3)


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@pytest.mark.parametrize('kwargs', [{}, NONE, EXTEND, CELLS], ids=name)
def test_a_trace_refuses_another_size(kwargs, image):
    model = make(**kwargs)
    model.set_exportable()
    traced = torch.jit.trace(model, image)
    torch.testing.assert_close(traced(image[:1]), model(image[:1]), **TOLERANCE)
    for size in ((64, 80), (48, 48), (128, 64)):
        with pytest.raises(RuntimeError):
            traced(torch.randn(2, 3, *size))


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [NONE, EXTEND, CELLS, {**CLASS, **EXTEND}], ids=name)
def test_onnx_alone_with_dynamic_height_and_width(kwargs, tmp_path):
    """The default model's is in test_export.py."""
    model = make(dynamic_img_size=True, **kwargs)
    example, shapes = torch.randn(2, 3, 96, 80), dynamic_shapes()
    # without `set_exportable`: ONNX has no name for our ops, so its exporter never sees them
    torch.onnx.export(model, (example,), tmp_path / 'model.onnx', dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert_alone(tmp_path, model, 'onnx')


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, EXTEND, CELLS], ids=name)
def test_package_of_aotinductor_alone(kwargs, tmp_path):
    model = make(dynamic_img_size=True, **kwargs)
    model.set_exportable()
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / 'model.pt2'))
    (tmp_path / 'model.pt2').rename(tmp_path / 'model.aoti')
    assert package.endswith('model.pt2')
    assert_alone(tmp_path, model, 'aoti')


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, EXTEND, CELLS, REGISTERS], ids=name)
def test_openvino_alone(kwargs, tmp_path):
    openvino = pytest.importorskip('openvino', reason='in the extra clients')
    model = make(dynamic_img_size=True, **kwargs)
    model.set_exportable()
    # it has no rule for torch.sym_min, which a graph holds unless there are at least as many patches as cells
    converted = openvino.convert_model(exported(model, least=3))
    openvino.save_model(converted, tmp_path / 'model.xml', compress_to_fp16=False)
    assert_alone(tmp_path, model, 'xml', sizes=((96, 80), (64, 64), (48, 128)))


@pytest.mark.slow
def test_openvino_alone_at_a_fixed_size(tmp_path):
    """It has no rule for the antialiased interpolation of a position embedding."""
    openvino = pytest.importorskip('openvino', reason='in the extra clients')
    model = make(**NONE)
    model.set_exportable()
    shapes = ({0: Dim('batch', min=1, max=64)},)
    program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=shapes)
    openvino.save_model(openvino.convert_model(program), tmp_path / 'model.xml', compress_to_fp16=False)
    assert_alone(tmp_path, model, 'xml', sizes=((64, 64),) * 3)


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, {**CLASS, **EXTEND}, CELLS], ids=name)
def test_program_with_a_mask_alone(kwargs, tmp_path):
    """The mask's sizes follow the image's: by the same names, torch.export would have to prove more than it can."""
    model = make(dynamic_img_size=True, **kwargs)
    model.set_exportable()
    batch, height, width = (Dim(n, min=2, max=64) for n in ('batch', 'height', 'width'))
    shapes = ({0: batch, 2: 16 * height, 3: 16 * width}, dict.fromkeys(range(3), Dim.AUTO))
    example = torch.randn(2, 3, 96, 80), torch.rand(2, 6, 5) < 0.6
    torch.export.save(torch.export.export(model, example, dynamic_shapes=shapes), tmp_path / 'model.pt2')
    model.set_exportable(False)
    sizes = (2, 6, 5), (3, 4, 4), (2, 3, 8), (2, 2, 7)
    inputs = [(torch.randn(b, 3, 16 * h, 16 * w), torch.rand(b, h, w) < 0.6) for b, h, w in sizes]
    for (x, mask), out in zip(inputs, run_alone(tmp_path, *inputs)['pt2']):
        torch.testing.assert_close(out, model(x, attn_mask=mask), **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, {'rel_pos': 'none'}], ids=name)
def test_pixel_program_alone(kwargs, tmp_path):
    model, image = pixel.make(**kwargs), torch.randint(9, (2, 3, 4, 4))
    model.set_exportable()
    program = torch.export.export(model, (image,), dynamic_shapes=({0: Dim('batch', min=1, max=64)},))
    torch.export.save(program, tmp_path / 'model.pt2')
    model.set_exportable(False)
    others = [(torch.randint(9, (batch, 3, 4, 4)),) for batch in (1, 2, 5)]
    for (x,), out in zip(others, run_alone(tmp_path, *others)['pt2']):
        torch.testing.assert_close(out, model(x), atol=1e-4, rtol=1e-4)
