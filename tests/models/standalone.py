"""Exported files run in a process that has neither this package nor timm."""

import subprocess
import sys

import numpy as np
import torch

# Each file of the folder runs on each input; the outputs are the file's name and the input's in one archive.
RUN = """
import pathlib, sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('nprf_vit', 'timm'):
            raise ModuleNotFoundError(f'{name} is absent here')


sys.meta_path.insert(0, Absent())
for name in ('nprf_vit', 'nprf_vit.ops', 'timm'):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert 'absent here' in str(error)
    else:
        sys.exit(f'{name} can be imported')

import numpy as np


def program(path):
    import torch

    run = torch.export.load(path).module()
    return lambda *x: run(*map(torch.from_numpy, x)).detach().numpy()


def package(path):
    import torch

    run = torch._inductor.aoti_load_package(str(path))
    return lambda *x: run(*map(torch.from_numpy, x)).numpy()


def traced(path):
    import torch

    run = torch.jit.load(path)
    return lambda *x: run(*map(torch.from_numpy, x)).detach().numpy()


def onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    names = [x.name for x in session.get_inputs()]
    return lambda *x: session.run(None, dict(zip(names, x)))[0]


def openvino(path):
    import openvino

    model = openvino.compile_model(path, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    return lambda *x: model(list(x))[0]


loaders = {'.pt2': program, '.aoti': package, '.ts': traced, '.onnx': onnx, '.xml': openvino}
folder, outputs = pathlib.Path(sys.argv[1]), {}
inputs = np.load(folder / 'inputs.npz')
for path in sorted(folder.iterdir()):
    if path.suffix in loaders:
        run = loaders[path.suffix](path)
        for i in range(len({name.partition('_')[0] for name in inputs})):
            given = [inputs[name] for name in sorted(inputs) if name.startswith(f'{i}_')]
            outputs[f'{path.suffix[1:]}_{i}'] = run(*given)
np.savez(folder / 'outputs.npz', **outputs)
assert not any(name.partition('.')[0] in ('nprf_vit', 'timm') for name in sys.modules)
"""


def run_alone(folder, *inputs):
    """Outputs by the file's suffix, one per tuple of inputs, of every exported file in a folder."""
    arrays = {f'{i}_{j}': x.numpy() for i, xs in enumerate(inputs) for j, x in enumerate(xs)}
    np.savez(folder / 'inputs.npz', **arrays)
    command = [sys.executable, '-I', '-c', RUN, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outputs = np.load(folder / 'outputs.npz')
    suffixes = {name.partition('_')[0] for name in outputs}
    return {s: [torch.from_numpy(outputs[f'{s}_{i}']) for i in range(len(inputs))] for s in suffixes}
