"""Where the host waits for the device in a training step, counted without a GPU.

python -m benchmarks.host_reads
python -m benchmarks.host_reads --config configs/imagenet1k/nprf_deit_base.yaml --set opt=lamb

A step runs on tensors without numbers, torch's meta device, by the path that CUDA takes. Counted, with the line that
asks for it: numbers read from the device, copies to the host, copies to the device that wait, and operations whose
result has a shape that depends on numbers. A copy to the host by `HostCopy` is read later, when the device has gone on.
Not seen: what opaque operations do inside (benchmarks.launches has the attention's), and the scaler of float16.
"""

import argparse
import collections
import contextlib
import copy
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import load_config
from nprf_vit.data.batch import Batch
from nprf_vit.engine import optimizer as optimizers
from nprf_vit.engine import transfer
from nprf_vit.engine.build import Training, build_training
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.lr_schedule import build_schedule
from nprf_vit.engine.train_step import Clock, Requests, compute_gradients, finish_step, start_update
from nprf_vit.errors import InputError

ROOT = Path(__file__).parent.parent
DEVICE = torch.device('meta')
_SHAPED_BY_NUMBERS = ('nonzero', 'masked_select', 'unique', 'bincount')


class HostReads(TorchDispatchMode):
    """Counts, by what it is and where it is asked for, what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        source = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        on_device = source is not None and source.device == DEVICE
        if on_device and name == '_local_scalar_dense':
            self._note('read')
            return False if source.dtype == torch.bool else 0.0 if source.is_floating_point() else 0
        if on_device and name.startswith(_SHAPED_BY_NUMBERS):
            self._note(name)
        if name in ('_to_copy', 'copy_') and self._leaves_device(name, args, kwargs):
            return torch.zeros(args[0].shape, dtype=kwargs.get('dtype') or args[0].dtype)
        if name.startswith('_fused_adam'):
            return None  # in place, and not known to this device
        return func(*args, **kwargs)

    def _leaves_device(self, name: str, args: Any, kwargs: Any) -> bool:
        there = args[1].device if name == 'copy_' else args[0].device
        here = args[0].device if name == 'copy_' else torch.device(kwargs.get('device') or there)
        waits = not (args[2] if len(args) > 2 else kwargs.get('non_blocking', False))
        if (there, here.type) == (DEVICE, 'cpu'):
            self._note('copy to the host' + ', waiting' * waits)
            return True
        if there.type == 'cpu' and here == DEVICE and waits:
            self._note('copy to the device, waiting')
        return False

    def _note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if Path(__file__) != Path(frame.filename)]
        own = [frame for frame in frames if '/nprf_vit/' in frame.filename] or frames[-1:]
        where = Path(own[-1].filename)
        self.found[f'{what}: {where.parent.name}/{where.name}:{own[-1].lineno} {own[-1].line}'] += 1


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """The meta device is taken for one that has what CUDA has."""
    kinds = ('cuda', DEVICE.type)
    with (
        mock.patch.object(optimizers, 'FUSED_DEVICES', kinds),
        mock.patch.object(transfer, 'ASYNC_DEVICES', kinds),
        mock.patch.object(torch.cuda, 'Event'),
        # by name: torch 2.8 takes the module out of torch.optim again
        mock.patch.object(import_module('torch.optim.adam'), '_device_dtype_check_for_fused'),
    ):
        yield


def _moved(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(DEVICE)


def on_device(config: Config) -> Training:
    """A run whose model, moving average and optimizer are on the device."""
    run = build_training(config, Place(0, 1, torch.device('cpu')), synthetic=True)
    model = _moved(run.model)
    if run.ema is not None:
        run.ema.module = _moved(run.ema.module)
    optimizer = optimizers.build_optimizer(config, model)
    return replace(
        run,
        place=replace(run.place, device=DEVICE),
        model=model,
        wrapped=model,
        optimizer=optimizer,
        schedule=build_schedule(config, optimizer, run.data.steps_per_epoch),
        transfer=transfer.BatchTransfer(DEVICE, run.task.prepare),
    )


def _batches(run: Training, sample: Any) -> Iterator[Batch]:
    parts = [torch.as_tensor(part) for part in (sample.image, sample.target)]
    while True:
        yield Batch(*(torch.empty((run.plan.micro, *part.shape), dtype=part.dtype) for part in parts))


def count(config: Config) -> dict[str, collections.Counter[str]]:
    """What makes the host wait in the second step, by the part of the step."""
    with as_on_cuda():
        run = on_device(config)
        run.model.train()
        sample = run.task.synthetic_samples(config, run.model)[0, 0, 0]
        batches, found = _batches(run, sample), {}
        for step in range(2):
            parts = {name: HostReads() for name in ('gradients', 'update', 'outcome')}
            with parts['gradients']:
                gradients = compute_gradients(run, batches, step, Clock())
            with parts['update']:
                pending = start_update(run, gradients, Requests())
            with parts['outcome']:
                finish_step(run, pending)
            found = {name: part.found for name, part in parts.items()}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', default=str(ROOT / 'configs/imagenet1k/nprf_deit_base.yaml'), metavar='FILE')
    parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
    args = parser.parse_args(argv)
    try:
        config = replace(load_config(args.config, args.set), initial_checkpoint=None, pretrained=False, workers=0)
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    for part, found in count(config).items():
        print(f'{part}: {sum(found.values())}')
        for what, number in found.most_common():
            print(f'  {number} x {what}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
