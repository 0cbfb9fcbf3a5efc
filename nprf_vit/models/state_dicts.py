"""State dicts of others, and of other grids, made to fit a model of this family.

Nothing is left out or made up silently: one line says what was dropped, added or resized.
"""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from torch import nn

from .input_size import checkpoint_grid_size

_logger = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]
Tokens = list[tuple[str, int]]

# class, distillation and register tokens mark a checkpoint that pools in another way, hence a head of another meaning
TOKENS = ('cls_token', 'dist_token', 'reg_token')
TABLE, FAR = 'rel_pos_bias.table', 'rel_pos_bias.far'
PREFIX = tuple(f'rel_pos_bias.{name}' for name in ('token_to_prefix', 'prefix_to_token', 'prefix_to_prefix'))
MAX_PATCH = 64 * 64  # pixels: timm's resampling takes memory and time as the square of these


def resize_pos_embed(
    pos_embed: torch.Tensor,
    new_size: Sequence[int],
    old_size: Sequence[int],
    num_prefix_tokens: int = 0,
) -> torch.Tensor:
    """Interpolate an absolute position embedding (1, P+N', C) to (1, P+N, C), as timm does (bicubic, antialias)."""
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    grid = grid.to(torch.promote_types(grid.dtype, torch.float32))
    grid = grid.transpose(1, 2).unflatten(2, tuple(old_size))  # 1, C, H', W'
    grid = F.interpolate(grid, size=list(new_size), mode='bicubic', antialias=True)
    grid = grid.flatten(2).mT.contiguous().to(pos_embed.dtype)  # 1, N, C; safetensors takes no other strides
    return torch.cat([prefix, grid], dim=1) if num_prefix_tokens else grid


class _Report:
    """What happened to which keys, in one line; the keys of all blocks count as one."""

    def __init__(self) -> None:
        self.actions: dict[str, list[str]] = {}

    def add(self, action: str, key: str, note: str = '') -> None:
        name = re.sub(r'^blocks\.\d+\.', 'blocks.*.', key) + (f' ({note})' if note else '')
        names = self.actions.setdefault(action, [])
        if name not in names:
            names.append(name)

    def __str__(self) -> str:
        return '; '.join(f'{action} {", ".join(names)}' for action, names in self.actions.items())


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> Weights:
    """A checkpoint as the model can load it: timm's name for what tools call before `load_state_dict`.

    `load_state_dict` does the same by itself, so nothing is lost where nobody calls this.

    Args:
        state_dict: The weights of a timm or DeiT checkpoint or of this family, as they are or under 'model' or
            'state_dict'; not changed.
        model: A KernelVisionTransformer.
    """
    for name in ('model', 'state_dict'):
        state_dict = state_dict.get(name, state_dict)
    adapted = dict(state_dict)
    adapt_state_dict(model, adapted)
    return adapted


def adapt_state_dict(model: nn.Module, state_dict: Weights, prefix: str = '') -> None:
    """Change a state dict in place so that the model loads it; a matching one is left alone.

    What is not foreseen here (other widths, other depths, another number of features) is left for
    `load_state_dict` to complain about.

    Args:
        model: A KernelVisionTransformer.
        state_dict: Its keys start with prefix; the values of a timm or DeiT checkpoint, or of this family.
        prefix: Where the model sits inside the module being loaded.
    """
    given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    own = model.state_dict()
    if not given or (given.keys() == own.keys() and all(given[k].shape == own[k].shape for k in own)):
        return
    report = _Report()
    adapted = _rename(given, own, report)
    optional, ours = ('head.', 'head_dist.', 'pos_embed', *TOKENS), (TABLE, FAR, *PREFIX, 'attn.w')
    if any(k not in adapted for k in own if not k.startswith(optional) and not k.endswith(ours)):
        return  # a part of a model, or of another one: no reason to reset what it does not mention
    _adapt_head(adapted, own, report)
    _adapt_positions(model, adapted, own, report)
    _adapt_projections(model, adapted, own, report)
    _adapt_patches(adapted, own, report)
    for key in given:
        del state_dict[prefix + key]
    state_dict.update({prefix + key: value for key, value in adapted.items()})
    if report.actions:
        _logger.warning(f'{type(model).__name__} adapted the checkpoint: {report}.')


def _rename(given: Weights, own: Weights, report: _Report) -> Weights:
    out = {}
    for key, value in given.items():
        new = re.sub(r'gamma_([12])$', r'ls\1.gamma', key)  # DeiT-III's own layout
        if key.startswith('fc_norm.') and key not in own and key[3:] not in given:
            new = key[3:]  # a pooled ViT normalizes after the mean; the weights serve as a start before it
        if new != key:
            report.add('renamed', key, f'to {new}')
        if new.startswith('pre_logits.'):
            report.add('dropped', key)
            continue
        out[new] = value
    return out


def _adapt_head(adapted: Weights, own: Weights, report: _Report) -> None:
    foreign = any(token in adapted for token in TOKENS)
    for key in [k for k in adapted if k.startswith('head_dist.') or k.startswith('head.')]:
        other_shape = key in own and adapted[key].shape != own[key].shape
        if key not in own or (foreign and other_shape):
            note = f'{adapted[key].shape[0]} classes' if other_shape else ''
            report.add('dropped', key, note)
            del adapted[key]
            if other_shape:
                adapted[key] = own[key]
                report.add('kept', key, "the model's own")
    for key in [k for k in own if k.startswith('head_dist.') and k not in adapted]:
        adapted[key] = own[key]
        report.add('added', key, "the model's own")


def _adapt_positions(model: nn.Module, adapted: Weights, own: Weights, report: _Report) -> None:
    """Prefix tokens, absolute embedding and bias tables."""
    given, wanted = _prefix_tokens(adapted), _prefix_tokens(own)
    for token in [t for t in TOKENS if t in adapted and t not in own]:
        report.add('dropped', token)
        del adapted[token]
    if 'pos_embed' in adapted and 'pos_embed' not in own:
        report.add('dropped', 'pos_embed')
        del adapted['pos_embed']
    elif 'pos_embed' in adapted:
        adapted['pos_embed'] = _fit_pos_embed(model, adapted, own['pos_embed'], given, wanted, report)
    elif 'pos_embed' in own:
        adapted['pos_embed'] = own['pos_embed']
        report.add('added', 'pos_embed', "the model's own")

    for token in [t for t in TOKENS if t in own and t not in adapted]:
        adapted[token] = own[token]
        report.add('added', token, "the model's own")
    given_far = {k for k in adapted if k.endswith(FAR)}
    for name in (TABLE, FAR, *PREFIX):
        _place_biases(model, adapted, own, name, report)
    _fit_prefix_biases(adapted, own, given, wanted, report)
    for key in [k for k in own if k.endswith(TABLE)]:
        table, target = adapted[key], own[key]
        if table.ndim != target.ndim or table.shape[0] != target.shape[0] or table.shape == target.shape:
            continue
        bias = model.get_submodule(key[: -len('.table')])
        if bias.keeps_table:
            what = 'between cells instead' if bias.extend == 'cells' else 'a window'
            report.add('kept', key, f'{tuple(table.shape[1:])}, {what} of {tuple(target.shape[1:])}')
            continue
        far = key[: -len('table')] + 'far'
        if far in own and adapted[far].shape != own[far].shape:
            continue
        known = not given_far.isdisjoint((far, FAR)) and far in own
        adapted[key], constant = bias.fit_table(table, adapted[far] if known else None)
        if constant is not None:
            adapted[far] = constant
        smaller = constant is not None and all(a >= b for a, b in zip(table.shape, target.shape))
        action = 'cropped' if smaller else 'resized'
        report.add(action, key, f'{tuple(table.shape[1:])} to {tuple(target.shape[1:])}')


def _prefix_tokens(weights: Weights) -> Tokens:
    """The tokens before the grid in their order, each by its kind and its number among these."""
    return [(t, i) for t in TOKENS if t in weights for i in range(weights[t].shape[1])]


def _place_biases(model: nn.Module, adapted: Weights, own: Weights, name: str, report: _Report) -> None:
    """Tables, or constants beyond them, to where the model has them: shared or in every layer."""
    shared = adapted.get(name)
    for key in [k for k in adapted if k.endswith(name) and k not in own]:
        if key == name and model.rel_pos == 'layer' and any(k.endswith(name) for k in own):
            report.add('copied', key, 'to every layer')
        else:
            report.add('dropped', key)
        del adapted[key]
    for key in [k for k in own if k.endswith(name) and k not in adapted]:
        if shared is not None:
            adapted[key] = shared.clone()
        else:
            adapted[key] = torch.zeros_like(own[key], device='cpu')
            report.add('added', key, 'zero')


def _fit_prefix_biases(adapted: Weights, own: Weights, given: Tokens, wanted: Tokens, report: _Report) -> None:
    """Biases of other tokens before the grid: those that both have keep theirs, others start at zero."""
    if given == wanted:
        return
    both = [(wanted.index(token), i) for i, token in enumerate(given) if token in wanted]
    for key in [k for k in own if k.endswith(PREFIX)]:
        values, fitted = adapted[key], torch.zeros_like(own[key], device='cpu')
        if values.ndim != fitted.ndim or values.shape[0] != fitted.shape[0] or values.shape[-1] != len(given):
            continue  # another number of heads: for `load_state_dict` to complain about
        for new, old in both:
            if values.ndim == 2:
                fitted[:, new] = values[:, old]
            else:
                for new_key, old_key in both:
                    fitted[:, new, new_key] = values[:, old, old_key]
        adapted[key] = fitted
        report.add('resized', key, f'{len(given)} to {len(wanted)} prefix tokens, {len(both)} of them the same')


def _fit_pos_embed(
    model: nn.Module, adapted: Weights, own: torch.Tensor, given: Tokens, wanted: Tokens, report: _Report
) -> torch.Tensor:
    """An absolute embedding (1, P'+N', C) for other tokens before the grid, and for another grid: (1, P+N, C)."""
    pos_embed = adapted['pos_embed']
    grid_size, num_prefix = tuple(model.patch_embed.grid_size), len(given)
    embedded = [] if model.no_embed_class else wanted
    if pos_embed.shape[1] == grid_size[0] * grid_size[1] + len(embedded) and given == wanted:
        return pos_embed
    # DeiT-III embeds no prefix token: then the length itself is that of a grid
    for prefix in (num_prefix, 0):
        count = pos_embed.shape[1] - prefix
        if count == grid_size[0] * grid_size[1]:
            old_size = grid_size
        else:
            told = checkpoint_grid_size(model, adapted.get('patch_embed.proj.weight'), count)
            old_size = told or (math.isqrt(max(count, 0)),) * 2
        if count > 0 and old_size[0] * old_size[1] == count:
            break
    else:
        raise ValueError(
            f'pos_embed {tuple(pos_embed.shape)} is no square grid, with or without {num_prefix} prefix tokens: '
            'load it into a model of its own img_size, then call set_input_size'
        )
    grid, known = pos_embed[:, prefix:], dict(zip(given, pos_embed[:, :prefix].unbind(1)))
    if not known.keys() <= set(embedded):
        report.add('dropped', 'pos_embed', f'its first {prefix} of {pos_embed.shape[1]}')
    if old_size != grid_size:
        grid = resize_pos_embed(grid, grid_size, old_size)
        report.add('resized', 'pos_embed', f'{old_size} to {grid_size}')
    own = torch.zeros_like(own, device='cpu') if own.is_meta else own.to(pos_embed)
    if not set(embedded) <= known.keys():
        report.add('added', 'pos_embed', "the model's own of prefix tokens")
    of_prefix = [known.get(token, own[:, i]) for i, token in enumerate(embedded)]  # 1, C each
    return torch.cat([*(x.unsqueeze(1) for x in of_prefix), grid], dim=1)


def _adapt_projections(model: nn.Module, adapted: Weights, own: Weights, report: _Report) -> None:
    for key in [k for k in adapted if k.endswith('attn.w') and k not in own]:
        report.add('dropped', key)
        del adapted[key]
    for key in [k for k in own if k.endswith('attn.w') and k not in adapted]:
        attn = model.get_submodule(key[: -len('.w')])
        adapted[key] = attn.draw() if own[key].is_meta else own[key]
        report.add('added', key, "the model's own")


def check_patch_kernel(name: str, weight: torch.Tensor) -> None:
    """Raise for a patch embedding that is no kernel of a size that anyone resamples."""
    if weight.ndim not in (2, 4) or 0 in weight.shape:
        raise ValueError(f'{name} {tuple(weight.shape)}: expected the kernel of a convolution')
    if weight.ndim == 4 and math.prod(weight.shape[-2:]) > MAX_PATCH:
        raise ValueError(f'{name} {tuple(weight.shape)}: patches of more than {MAX_PATCH} pixels are not resampled')


def _adapt_patches(adapted: Weights, own: Weights, report: _Report) -> None:
    key = 'patch_embed.proj.weight'
    weight = adapted.get(key)
    if weight is None:
        return
    if weight.ndim == 2:  # a linear layer over flattened patches
        weight = adapted[key] = weight.reshape(own[key].shape)
    if weight.shape[-2:] != own[key].shape[-2:]:
        check_patch_kernel(key, weight)
        adapted[key] = resample_patch_embed(weight, list(own[key].shape[-2:]))
        report.add('resized', key, f'{tuple(weight.shape[-2:])} to {tuple(own[key].shape[-2:])}')
