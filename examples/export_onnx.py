"""Export the shipped digits model to ONNX and run it in onnxruntime: same answers, any batch size.

python examples/export_onnx.py [--output digits.onnx]

Needs onnx, onnxscript and onnxruntime. The graph holds plain operators, no code of this package.

It prints:

    207 nodes of 21 kinds, 0.81 MB
    largest difference of a logit: 2e-06, logits up to 5.2
    top-1 of 360: torch 98.61, onnxruntime 98.61
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import timm
import torch
from torch.export import Dim

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.data.datasets.digits import Digits


def export(model: torch.nn.Module, path: Path) -> None:
    """Images (batch, 1, 8, 8) to logits (batch, 10), with a batch of any size."""
    example = torch.zeros(2, *model.pretrained_cfg['input_size'])
    torch.onnx.export(
        model, (example,), path, dynamo=True, verbose=False, dynamic_shapes=({0: Dim('batch', min=1)},),
        input_names=['image'], output_names=['logits'], external_data=False,
    )  # fmt: skip


def digits(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The 360 held out, by the transform that timm derives from the model."""
    data = Digits('validation')
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return torch.stack([transform(data[i][0]) for i in range(len(data))]), torch.from_numpy(data.targets).long()


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', type=Path, metavar='FILE', help='where the graph goes; default: nowhere to stay')
    args = parser.parse_args(argv)
    model = timm.create_model('nprf_deit_tiny.digits', pretrained=True).eval()
    images, targets = digits(model)
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or Path(folder) / 'digits.onnx'
        export(model, path)
        session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
        nodes = Counter(node.op_type for node in onnx.load(path).graph.node)
        size = path.stat().st_size
    print(f'{sum(nodes.values())} nodes of {len(nodes)} kinds, {size / 1e6:.2f} MB')
    logits = torch.cat([torch.from_numpy(session.run(None, {'image': x.numpy()})[0]) for x in images.split(100)])
    expected = model(images)
    found = {
        'difference': (logits - expected).abs().max().item(),
        'torch': 100 * (expected.argmax(-1) == targets).double().mean().item(),
        'onnxruntime': 100 * (logits.argmax(-1) == targets).double().mean().item(),
    }
    print(f'largest difference of a logit: {found["difference"]:.0e}, logits up to {expected.abs().max():.1f}')
    print(f'top-1 of {len(images)}: torch {found["torch"]:.2f}, onnxruntime {found["onnxruntime"]:.2f}')
    return found


if __name__ == '__main__':
    main()
