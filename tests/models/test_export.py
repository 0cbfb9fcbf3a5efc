"""Compilers and exporters: each graph agrees with eager."""

import pytest
import torch
from torch.export import Dim

from nprf_vit.layers import KERNELS

from .small import make as make_model


def make(**kwargs):
    return make_model(depth=1, **kwargs)


def variants(*kwargs):
    """The paper's model in the default suite, the others in the slow one: a graph takes seconds to build."""
    return [
        {},
        *(pytest.param(k, marks=pytest.mark.slow, id='-'.join(f'{a}={b}' for a, b in k.items())) for k in kwargs),
    ]


LAYER, NONE, SOFTMAX, FFT = {'rel_pos': 'layer'}, {'rel_pos': 'none'}, {'kernel': 'softmax'}, {'attn_backend': 'fft'}
EXTEND = {'rel_pos_extend': 'extend', 'rel_pos_size': 3}
CELLS = {'rel_pos_extend': 'cells', 'rel_pos_size': 3}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    'kwargs',
    variants(
        LAYER,
        NONE,
        SOFTMAX,
        FFT,
        {'dynamic_img_size': True},
        {'dynamic_img_size': True, **EXTEND},
        {'dynamic_img_size': True, **CELLS},
    ),
)
def test_compile_in_one_graph(kwargs, image):
    # aot_eager traces and differentiates as inductor does, without minutes of C++ compilation
    model = make(**kwargs).train()
    expected = model(image)
    expected.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    out = compiled(image)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], msg=name)
    if 'dynamic_img_size' in kwargs:
        for size in ((96, 48), (64, 64), (80, 96)):
            other = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(other), model(other))


def test_compile_for_inference(image):
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    with torch.no_grad():
        torch.testing.assert_close(compiled(image), model(image))
        model.rel_pos_bias.table.normal_()
        torch.testing.assert_close(compiled(image), model(image))


@pytest.mark.slow
def test_compile_with_inductor(image):
    model = make()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(image), model(image))


@pytest.mark.parametrize('kwargs', [FFT, *variants(LAYER, NONE, SOFTMAX)])
def test_export_with_dynamic_batch(kwargs, image):
    model = make(**kwargs)
    program = torch.export.export(model, (image,), dynamic_shapes=({0: Dim('batch', min=1, max=64)},))
    for batch in (1, 2, 5):
        other = torch.randn(batch, 3, 64, 64)
        torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize(
    'kwargs', variants(LAYER, NONE, SOFTMAX, FFT, EXTEND, {**EXTEND, **SOFTMAX}, CELLS, {**CELLS, **SOFTMAX})
)
def test_export_with_dynamic_height_and_width(kwargs, tmp_path):
    model = make(dynamic_img_size=True, **kwargs)
    height, width = Dim('height', min=2, max=64), Dim('width', min=2, max=64)
    shapes = ({0: Dim('batch', min=1, max=64), 2: 16 * height, 3: 16 * width},)
    program = torch.export.export(model, (torch.randn(2, 3, 96, 80),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / 'model.pt2')
    program = torch.export.load(tmp_path / 'model.pt2')
    for size in ((96, 80), (64, 64), (32, 128), (48, 48)):
        other = torch.randn(3, 3, *size)
        torch.testing.assert_close(program.module()(other), model(other))


def onnx_session(model, example, path, **kwargs):
    pytest.importorskip('onnxscript', reason='ONNX export needs onnx and onnxscript, which the test extra may lack')
    runtime = pytest.importorskip('onnxruntime', reason='running an ONNX graph needs onnxruntime')
    torch.onnx.export(model, (example,), path, dynamo=True, verbose=False, **kwargs)
    session = runtime.InferenceSession(path, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


@pytest.mark.parametrize(
    'kwargs',
    variants(*({'kernel': k} for k in KERNELS if k != 'prf'), {'normalize': False}, LAYER, NONE, EXTEND, CELLS),
)
def test_onnx(kwargs, image, tmp_path):
    model = make(attn_backend='direct', **kwargs)
    shapes = ({0: Dim('batch', min=1, max=64)},)
    run = onnx_session(model, image, tmp_path / 'model.onnx', dynamic_shapes=shapes)
    for batch in (1, 3):
        other = torch.randn(batch, 3, 64, 64)
        torch.testing.assert_close(run(other), model(other), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.normal_()
    assert not torch.allclose(run(other), model(other), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, EXTEND, CELLS])
def test_onnx_with_dynamic_height_and_width(kwargs, tmp_path):
    model = make(dynamic_img_size=True, attn_backend='direct', **kwargs)
    height, width = Dim('height', min=2, max=64), Dim('width', min=2, max=64)
    shapes = ({0: Dim('batch', min=1, max=64), 2: 16 * height, 3: 16 * width},)
    run = onnx_session(model, torch.randn(2, 3, 96, 80), tmp_path / 'model.onnx', dynamic_shapes=shapes)
    for size in ((96, 80), (64, 64), (32, 128)):
        other = torch.randn(2, 3, *size)
        torch.testing.assert_close(run(other), model(other), atol=1e-4, rtol=1e-4)
