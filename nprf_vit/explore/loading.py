"""The models of a page: from checkpoint files, at the sizes asked for."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import load_config, make_config, override
from nprf_vit.engine.checkpoint.file import FORMAT, check_file, read_checkpoint
from nprf_vit.engine.model import build_model, load_exact, load_initial, read_weights
from nprf_vit.engine.output.report import model_title
from nprf_vit.errors import InputError, first_line
from nprf_vit.models.conversion import convert


@dataclass
class Loaded:
    """A model in evaluation mode, and the configuration that tells of its inputs."""

    name: str
    title: str
    config: Config
    model: nn.Module

    @property
    def is_pixel(self) -> bool:
        return self.config.task == 'pixel'

    @property
    def img_size(self) -> tuple[int, int]:
        embed = getattr(self.model, 'patch_embed', None)
        size = getattr(embed if embed is not None else self.model, 'img_size', None)
        if size is None:
            raise InputError(f'{self.title} has no patches to show: expected a ViT or a model of pixels')
        return to_2tuple(size)


@dataclass
class Wanted:
    """How the user names a model."""

    checkpoint: str
    model: str | None = None  # of timm's registry
    config: str | None = None  # a YAML file; unless given, what is in the checkpoint or beside it
    overrides: Sequence[str] = ()
    use_ema: bool = True


def load(wanted: Wanted) -> Loaded:
    """Read a checkpoint of train.py, published weights with their YAML file, or a state dict for a model of timm."""
    path = check_file(wanted.checkpoint)
    content = {} if path.suffix == '.safetensors' else read_checkpoint(path, any_format=True)
    ours = content.get('format') == FORMAT and 'config' in content
    if wanted.model:
        config = _config_of_weights(wanted)
    elif wanted.config or not ours:
        config = load_config(wanted.config or _config_beside(path), wanted.overrides)
    else:
        config = make_config(content['config'], wanted.overrides, origin=str(path))
    config = dataclasses.replace(config, drop_path=0.0, drop=0.0, torchcompile=None)
    model = build_model(config, fresh=False, checkpoint=str(path))
    averaged = content.get('state_dict_ema') if ours and wanted.use_ema else None
    if ours and not wanted.model:
        load_exact(model, content['state_dict'] if averaged is None else averaged, str(path))
    else:
        load_initial(model, str(path), new_head=False)
    return Loaded(path.name, model_title(config), config, model.eval())


def _config_beside(path: Path) -> Path:
    """What convert_checkpoint writes beside the weights it makes, and docs/results beside those it holds."""
    for candidate in (path.with_suffix('.yaml'), path.with_name('config.yaml')):
        if candidate.is_file():
            return candidate
    raise InputError(
        f'{path} does not say which model it is of: give --model NAME of timm, or --config FILE '
        f'(looked for {path.with_suffix(".yaml").name} and config.yaml beside it)'
    )


def _config_of_weights(wanted: Wanted) -> Config:
    """For a model of timm's registry: classes and channels as the weights have them, unless overridden."""
    name = wanted.model
    assert name is not None
    values: dict[str, Any] = {'model': name}
    weights = read_weights(wanted.checkpoint)
    own = timm.models.get_pretrained_cfg(name.split('.')[0], allow_unregistered=True)
    for key, where, axis in (('num_classes', 'classifier', 0), ('in_chans', 'first_conv', 1)):
        layer = getattr(own, where, None) if own is not None else None
        weight = weights.get(f'{layer}.weight') if isinstance(layer, str) else None
        if weight is not None and weight.ndim > axis:
            values[key] = weight.shape[axis]
    return make_config(values, wanted.overrides, origin=wanted.checkpoint)


def twin(origin: Loaded, kernel: str, feature_dim: int) -> Loaded:
    """The same weights under another attention kernel."""
    try:
        model = convert(origin.model, kernel, feature_dim)
    except ValueError as error:
        raise InputError(f'{origin.name} cannot be converted: {first_line(error)}') from None
    what = kernel if kernel == 'softmax' else f'{kernel}, {feature_dim} features'
    return Loaded(f'{origin.name} as {what}', f'{origin.title}, converted to {what}', origin.config, model)


def at_size(loaded: Loaded, size: int | tuple[int, int]) -> Loaded:
    """The model for another resolution: its position tables are resized as it does that itself."""
    height, width = to_2tuple(size)
    if (height, width) == loaded.img_size:
        return dataclasses.replace(loaded, config=override(loaded.config, img_size=(height, width)))
    if loaded.is_pixel or not hasattr(loaded.model, 'set_input_size'):
        own = 'x'.join(map(str, loaded.img_size))
        raise InputError(f'--img-size {height}: {loaded.title} takes images of {own} only')
    patch = to_2tuple(loaded.model.patch_embed.patch_size)
    if height % patch[0] or width % patch[1]:
        raise InputError(f'--img-size {height}: not divisible by the patch size {patch[0]}x{patch[1]}')
    model = copy.deepcopy(loaded.model)
    model.set_input_size(img_size=(height, width))
    return dataclasses.replace(loaded, model=model, config=override(loaded.config, img_size=(height, width)))
