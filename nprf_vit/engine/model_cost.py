"""Parameters, multiply-adds and memory of a model by its name, from shapes alone: nothing is computed."""

from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nprf_vit.config.yaml_file import make_config
from nprf_vit.engine.optimizer import build_optimizer
from nprf_vit.models import PixelTransformer

from .dry_run.memory_count import CannotCount, count_forward, count_updates, refusals

Size = tuple[int, int]


class ModelCost(NamedTuple):
    """Of one model at one size; bytes are counted tensor by tensor, as a dry run does, for a batch of images."""

    name: str
    img_size: Size
    parameters: int
    macs: int  # of one image, forward
    forward_bytes: int  # weights and what a forward pass holds at its peak, without gradients
    update_bytes: int | None  # weights, gradients, the optimizer's state and what an update holds at its peak


def own_size(name: str) -> Size:
    """The image size that a model was made for."""
    height, width = timm.get_pretrained_cfg(name, allow_unregistered=False).input_size[-2:]
    return height, width


def on_meta(name: str, img_size: Size) -> nn.Module:
    """A model without memory: shapes only.

    Raises:
        CannotCount: If there is no such model at that size.
    """
    with refusals(), torch.device('meta'):
        return timm.create_model(name, img_size=img_size).eval()


def count_flops(model: nn.Module, image: torch.Tensor) -> tuple[int, int]:
    """Of one forward pass: all, and those of the attention op; on the meta device nothing is computed."""
    counter = FlopCounterMode(display=False)
    with refusals(), counter, torch.no_grad():
        model(image)
    counts = counter.get_flop_counts()['Global']
    return counter.get_total_flops(), sum(n for op, n in counts.items() if 'attend' in str(op))


def count_model(name: str, img_size: Size | None = None, batch_size: int = 1, update: bool = True) -> ModelCost:
    """Count a model of timm's registry at a size, its own unless given, in float32.

    Args:
        batch_size: Images of which the memory is counted.
        update: Whether to count an update with AdamW as well, which takes a few times as long.

    Raises:
        CannotCount: If the model does not take that size or does not run on tensors without numbers.
    """
    size = img_size or own_size(name)
    model = on_meta(name, size)
    parameters = sum(p.numel() for p in model.parameters())
    # autograd whose first use is on fake tensors starts threads, after which no forked process could use it
    torch.ones((), requires_grad=True).backward()
    config = make_config({'model': name, 'opt': 'adamw', 'lr': 1e-3})
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device='cpu')
        images = _image(model, batch_size, size)
        with FlopCounterMode(display=False) as counter:
            forward = count_forward(model, images)
        updated = None
        if update:
            model.train()
            updated = count_updates(
                model, lambda: build_optimizer(config, model), lambda m, opt: _update(m, opt, images)
            )
    macs = counter.get_total_flops() // 2 // batch_size
    return ModelCost(name, size, parameters, macs, forward.total, updated and updated.total)


def _image(model: nn.Module, batch: int, size: Size) -> torch.Tensor:
    """Images of the model's channels, bytes for a model of pixels."""
    if isinstance(model, PixelTransformer):
        return torch.empty(batch, model.in_chans, *size, dtype=torch.long)
    return torch.empty(batch, timm.data.resolve_model_data_config(model)['input_size'][0], *size)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    logits = model(images)
    several = logits if isinstance(logits, tuple) else (logits,)  # a distilled model has two heads
    loss = torch.stack([_loss(part) for part in several]).sum()
    del logits, several
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _loss(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.flatten(0, -2).float()  # images, or the bytes of all images; classes
    return F.cross_entropy(rows, torch.empty(len(rows), dtype=torch.long, device=rows.device))


__all__ = ['CannotCount', 'ModelCost', 'count_flops', 'count_model', 'own_size']
