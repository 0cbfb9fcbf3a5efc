"""DDP wrapping and compilation of the model that is trained."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError

from .process_group import Place


def wrap_model(config: Config, model: nn.Module, place: Place, has_unused: bool = False) -> nn.Module:
    """Evaluation keeps to the bare model, so that compiled and plain runs are measured by the same arithmetic.

    Args:
        has_unused: Some parameters get no gradient; DDP then looks for them in every step, which takes its time.
    """
    wrapped = model
    if place.world > 1:
        ids = None if place.device.index is None else [place.device.index]
        wrapped = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=has_unused)
    if config.torchcompile:
        known = torch.compiler.list_backends(exclude_tags=())
        if config.torchcompile not in known:
            raise InputError(f'torchcompile {config.torchcompile} is none of {", ".join(known)}')
        wrapped = torch.compile(wrapped, backend=config.torchcompile)
    return wrapped
