"""From a configuration to a model with its first weights."""

import difflib
import inspect
import logging
import re
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from timm.models import VisionTransformer, clean_state_dict, load_state_dict
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.engine.checkpoint.file import DAMAGE, WrongCheckpoint, check_file, read_state_dict, unreadable

from ..data.seeding import derive_seed
from ..errors import InputError, first_line
from ..layers import RelPosBias
from ..models import KernelVisionTransformer, PixelTransformer  # also registers the models with timm
from ..models.state_dicts import check_patch_kernel
from .model_size import TooLarge, build_within, largest_for

_logger = logging.getLogger(__name__)


def build_model(config: Config, fresh: bool = True, checkpoint: str | None = None) -> nn.Module:
    """Create the model with weights drawn from the seed; if `fresh`, load the weights that the configuration names.

    Args:
        checkpoint: File whose weights the model is built for; a model that is far larger is refused.
    """
    _check_name(config.model)
    args: dict[str, Any] = {'in_chans': config.in_chans, 'num_classes': config.num_classes, 'img_size': config.img_size}
    args = {name: value for name, value in args.items() if value is not None}
    args |= {'drop_rate': config.drop, 'drop_path_rate': config.drop_path}
    if config.pretrained and fresh and ':' not in config.model and not timm.is_model_pretrained(config.model):
        raise InputError(
            f'no weights are published for {config.model}: give --checkpoint FILE, or the key initial_checkpoint'
        )
    try:
        if checkpoint is None:
            model = _create(config, config.pretrained and fresh, args)
        else:
            model = build_within(largest_for(check_file(checkpoint)), lambda: _create(config, False, args))
    except TooLarge:
        raise WrongCheckpoint(
            f'{checkpoint} is a checkpoint of another model: it is far too small for the weights of {config.model} '
            f'with {config.model_kwargs or "its defaults"}'
        ) from None
    except InputError:
        raise
    except Exception as error:  # a constructor given any values may raise anything
        raise InputError(
            f'cannot build model {config.model}: {error}{_nearest_argument(config.model, error)}'
        ) from error
    if config.initial_checkpoint and fresh:
        load_initial(model, config.initial_checkpoint)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def _create(config: Config, pretrained: bool, args: dict[str, Any]) -> nn.Module:
    """timm's model, without those arguments that it does not take and that would change nothing.

    Convolutional networks take images of any size and no `img_size`; some models know no stochastic depth.
    """
    while True:
        torch.manual_seed(derive_seed(config.seed, 'init'))
        try:
            model = timm.create_model(config.model, pretrained=pretrained, **(args | config.model_kwargs))
            break
        except TypeError as error:
            refused = _refused(error)
            idle = refused == 'img_size' or (refused in ('drop_rate', 'drop_path_rate') and not args.get(refused))
            if refused not in args or not idle:
                raise
            args = {name: value for name, value in args.items() if name != refused}
    own = tuple(model.pretrained_cfg.get('input_size', ())[-2:])
    fixed = model.pretrained_cfg.get('fixed_input_size') and 'img_size' not in args
    if config.img_size and fixed and to_2tuple(config.img_size) != own:
        raise ValueError(f'it takes images of {own[0]}x{own[1]} only, not img_size {config.img_size}')
    return model


def _refused(error: Exception) -> str:
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found else ''


def _check_name(name: str) -> None:
    if ':' in name or timm.is_model(name.split('.')[0]):
        return
    near = difflib.get_close_matches(name, timm.list_models(), n=3)
    raise InputError(f'unknown model {name}: ' + (f'near are {", ".join(near)}' if near else 'see timm.list_models()'))


def _nearest_argument(model: str, error: Exception) -> str:
    """What a refused argument was meant to be: one that is near, or none at all."""
    refused = _refused(error)
    key = {'drop_rate': 'drop', 'drop_path_rate': 'drop_path'}.get(refused)
    if key:
        return f': {model} has none, leave the key {key} at 0'
    classes = KernelVisionTransformer, VisionTransformer, PixelTransformer
    known = {name for cls in classes for name in inspect.signature(cls).parameters} - {'kwargs', refused}
    own = timm.is_model(model) and timm.model_entrypoint(model).__module__.startswith('nprf_vit')
    near = difflib.get_close_matches(refused, known, n=1) if refused and own else []
    return f'; did you mean {near[0]}?' if near else ''


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """A state dict from a checkpoint of ours, of DeiT or of timm, or from safetensors; executes nothing in the file."""
    check_file(path)
    if Path(path).suffix != '.safetensors':
        return clean_state_dict(read_state_dict(path))
    try:
        weights = load_state_dict(path)
    except DAMAGE as error:
        raise unreadable(path, error) from error
    strange = next((name for name, value in weights.items() if value.is_complex() or value.is_quantized), None)
    if strange is not None:
        raise unreadable(path, ValueError(f'{strange} is of {weights[strange].dtype}'))
    return weights


def load_initial(model: nn.Module, path: str, new_head: bool = True) -> None:
    """Start from other weights: another resolution, another number of classes, or a DeiT checkpoint.

    The models of this package fit position tables and tokens themselves and log what they changed; timm's have a
    filter function for that. A classifier for other classes is replaced by a fresh one, if
    `new_head`. Anything else is an error.
    """
    weights = read_weights(path)
    adapt = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    if adapt is not None:
        try:
            for name in [name for name in weights if name.endswith('patch_embed.proj.weight')]:
                check_patch_kernel(name, weights[name])
            weights = adapt(weights, model)
        except DAMAGE as error:
            raise WrongCheckpoint(f'{path} is a checkpoint of another model: {first_line(error)[:160]}') from error
    own = model.state_dict()
    head = model.pretrained_cfg.get('classifier')
    for name in (f'{head}.weight', f'{head}.bias'):
        if new_head and name in weights and name in own and weights[name].shape != own[name].shape:
            _logger.warning(
                f'{name}: {tuple(weights[name].shape)} in {path} replaced by a fresh {tuple(own[name].shape)}'
            )
            weights[name] = own[name]
    load_fitted(model, weights, path)


def load_fitted(model: nn.Module, weights: dict[str, torch.Tensor], origin: str) -> None:
    """Load weights that may be of another grid, which the models of this package fit to their own."""
    _check_types(model.state_dict(), weights, origin)
    try:
        model.load_state_dict(weights, strict=True)
    except DAMAGE as error:
        first, *more = [line.strip() for line in str(error).splitlines()][1:] or [first_line(error)]
        first = first if len(first) <= 160 else f'{first[:160]} …'
        raise WrongCheckpoint(
            f'{origin} is a checkpoint of another model: {first}' + ' (and more)' * bool(more)
        ) from error


def load_exact(model: nn.Module, weights: dict[str, torch.Tensor], origin: str) -> None:
    """Load weights that must be this very model's; nothing is adapted but the size of a table that is kept as it is."""
    own = model.state_dict()
    windows = {f'{name}.table' for name, m in model.named_modules() if isinstance(m, RelPosBias) and m.keeps_table}

    def fits(name: str) -> bool:
        here, there = own[name].shape, weights[name].shape
        return here == there or (name in windows and here[0] == there[0] and len(here) == len(there))

    wrong = [name for name in own if name not in weights or not fits(name)]
    extra = [name for name in weights if name not in own]
    if wrong or extra:
        name = (wrong or extra)[0]
        there, here = (tuple(d[name].shape) if name in d else 'absent' for d in (weights, own))
        raise WrongCheckpoint(
            f'{origin} is a checkpoint of another model: {len(wrong) + len(extra)} weights differ, '
            f'the first is {name}, {there} there and {here} here'
        )
    _check_types(own, weights, origin)
    model.load_state_dict(weights)


def _check_types(own: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], origin: str) -> None:
    """Integers for real numbers are those of a quantized model; loading would take them for its weights."""
    for name in own:
        if name in weights and weights[name].is_floating_point() != own[name].is_floating_point():
            there, here = weights[name].dtype, own[name].dtype
            raise WrongCheckpoint(f'{origin} is a checkpoint of another model: {name} is of {there}, here of {here}')
