"""DDP wrapping and compilation of the model that is trained."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError

from .process_group import Place


def wrap_model(config: Config, model: nn.Module, place: Place) -> nn.Module:
    """Evaluation keeps to the bare model, so that compiled and plain runs are measured by the same arithmetic."""
    wrapped = model
    if place.world > 1:
        ids = [place.device.index] if place.device.type == 'cuda' else None
        # Beyond two ranks the rounding of a sum depends on where in its bucket a gradient lies, and DDP rearranges its
        # buckets after the first step of each process, unless it looks for unused parameters: a continuation would
        # differ in the last bits.
        wrapped = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=place.world > 2)
    if config.torchcompile:
        known = torch.compiler.list_backends(exclude_tags=())
        if config.torchcompile not in known:
            raise InputError(f'torchcompile {config.torchcompile} is none of {", ".join(known)}')
        wrapped = torch.compile(wrapped, backend=config.torchcompile)
    return wrapped
