"""BEiT and timm's vit_relpos models as models of this family, with their biases.

Both add a matrix to the scores which is a function of the offset between two tokens, and for a class token three
numbers per head. The matrix is asked for and read back as a table, whatever made it: a lookup or an MLP.

K heads, P prefix tokens, N tokens on an H×W grid.
"""

import copy
from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.vision_transformer_relpos import RelPosBlock, VisionTransformerRelPos
from torch import nn

from nprf_vit.ops.bias import PrefixBias, prefixed_matrix
from nprf_vit.ops.offsets import expand_table

from .kernel_deit import KernelVisionTransformer

_EPS = 1e-6  # of the family's norms
_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {Beit: BeitBlock, VisionTransformerRelPos: RelPosBlock}
_OTHER_NAMES = ('relative_position_bias_table', 'shared_rel_pos.', '.rel_pos.', '.q_bias', '.v_bias')


def has_rel_pos_twin(model: nn.Module) -> bool:
    """Whether `rel_pos_twin` is the one to ask."""
    return isinstance(model, tuple(_BLOCKS))


def rel_pos_twin(model: nn.Module, kernel: str, feature_dim: int, seed: int) -> KernelVisionTransformer:
    """The model as one of this family, with unnormalized attention and its own biases; 'softmax' changes nothing.

    Args:
        model: A Beit or VisionTransformerRelPos of timm; `ValueError` says what has no counterpart.
        kernel, feature_dim, seed: As in `nprf_vit.convert`.

    Returns:
        A model on the same device, in the same dtype and mode.
    """
    arguments = twin_arguments(model)
    if arguments['attn_drop_rate'] and kernel != 'softmax':
        raise ValueError(
            f'cannot convert {type(model).__name__}: attn_drop {arguments["attn_drop_rate"]} needs attention weights, '
            f'which kernel {kernel!r} never forms; set attn_drop.p to 0 first'
        )
    like = model.blocks[0].attn.qkv.weight
    options = {'kernel': kernel, 'feature_dim': feature_dim, 'seed': seed, 'device': like.device, 'dtype': like.dtype}
    twin = KernelVisionTransformer(**arguments, **options)
    weights = {**_shared_weights(model), **_biases(model)}
    projections = {key: value for key, value in twin.state_dict().items() if key.endswith('attn.w')}
    twin.load_state_dict({**weights, **projections})
    return twin.train(model.training)


def twin_arguments(model: nn.Module) -> dict[str, Any]:
    """What `KernelVisionTransformer` is to be called with, besides kernel, features and seed: plain values."""
    _check(model)
    block, embed = model.blocks[0], model.patch_embed
    has_scale = block.gamma_1 is not None if isinstance(model, Beit) else not isinstance(block.ls1, nn.Identity)
    pos_embed = getattr(model, 'pos_embed', None)
    return {
        'img_size': tuple(embed.img_size),
        'patch_size': tuple(embed.patch_size),
        'in_chans': model.in_chans,
        'num_classes': model.num_classes,
        'global_pool': model.global_pool,
        'embed_dim': model.embed_dim,
        'depth': len(model.blocks),
        'num_heads': block.attn.num_heads,
        'mlp_ratio': _mlp_ratio(block.mlp.fc1.out_features, model.embed_dim),
        'qkv_bias': block.attn.qkv.bias is not None or getattr(block.attn, 'q_bias', None) is not None,
        'qk_norm': not isinstance(getattr(block.attn, 'q_norm', nn.Identity()), nn.Identity),
        'scale_mlp_norm': not isinstance(block.mlp.norm, nn.Identity),
        'init_values': 1e-5 if has_scale else None,  # what it starts from; the weights are taken over
        'class_token': model.num_prefix_tokens > 0,
        'pos_embed': 'none' if pos_embed is None else 'learn',
        'fc_norm': not isinstance(model.fc_norm, nn.Identity),
        'drop_rate': model.head_drop.p,
        'pos_drop_rate': model.pos_drop.p if isinstance(model, Beit) else 0.0,
        'proj_drop_rate': block.attn.proj_drop.p,
        'attn_drop_rate': block.attn.attn_drop.p,
        'drop_path_rate': getattr(model.blocks[-1].drop_path1, 'drop_prob', None) or 0.0,
        'normalize': False,
        'rel_pos': _kind(model),
    }


def _mlp_ratio(hidden: int, dim: int) -> float:
    """A ratio of which timm makes as many hidden channels, rounding dim·ratio down."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def _kind(model: nn.Module) -> str:
    if any(_own_matrix(block) is not None for block in model.blocks):
        return 'layer'
    return 'none' if _shared_matrix(model) is None else 'shared'


def _check(model: Any) -> None:
    """Raise, by name, for what this family has no counterpart of."""
    (block_type,) = (block for kind, block in _BLOCKS.items() if isinstance(model, kind))
    for i, block in enumerate(model.blocks):
        if type(block) is not block_type:
            raise ValueError(f'cannot convert blocks.{i}: {type(block).__name__} is not a {block_type.__name__}')
        if type(block.mlp) is not Mlp or not isinstance(block.mlp.act, nn.GELU):
            raise ValueError(f'cannot convert blocks.{i}.mlp: {type(block.mlp).__name__} is not an Mlp with GELU')
    if type(model.patch_embed) is not PatchEmbed or not isinstance(model.patch_embed.norm, nn.Identity):
        raise ValueError('cannot convert patch_embed: expected a PatchEmbed without a norm')
    for name, module in model.named_modules():
        eps = getattr(module, 'eps', _EPS)
        if eps != _EPS:
            raise ValueError(f'cannot convert {name}: its eps is {eps}, the norms of this family have {_EPS}')


def _shared_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What both models have, by the names of this family."""
    weights = {}
    for key, value in model.state_dict().items():
        if not any(part in key for part in _OTHER_NAMES):
            weights[key.replace('gamma_1', 'ls1.gamma').replace('gamma_2', 'ls2.gamma')] = value.clone()
    for i, block in enumerate(model.blocks):
        q_bias = getattr(block.attn, 'q_bias', None)
        if q_bias is not None:  # BEiT's keys have no bias: it would cancel in the softmax
            qkv_bias = torch.cat([q_bias, torch.zeros_like(q_bias), block.attn.v_bias])
            weights[f'blocks.{i}.attn.qkv.bias'] = qkv_bias.detach()
    return weights


@torch.no_grad()
def _biases(model: nn.Module) -> dict[str, torch.Tensor]:
    shared, kind = _shared_matrix(model), _kind(model)
    if kind == 'none':
        return {}
    if kind == 'shared':
        return _read_back(shared, model, 'rel_pos_bias')
    weights: dict[str, torch.Tensor] = {}
    for i, block in enumerate(model.blocks):
        matrix = _own_matrix(block)
        if shared is not None:  # BEiT adds one to the other
            matrix = shared if matrix is None else matrix + shared
        weights |= _read_back(matrix, model, f'blocks.{i}.attn.rel_pos_bias')
    return weights


def _own_matrix(block: nn.Module) -> torch.Tensor | None:
    """The bias (K, P+N, P+N) that a block learns by itself."""
    if isinstance(block, BeitBlock):
        has_table = block.attn.relative_position_bias_table is not None
        return block.attn._get_rel_pos_bias()[0].detach() if has_table else None
    return _matrix(block.attn.rel_pos)


def _shared_matrix(model: nn.Module) -> torch.Tensor | None:
    if isinstance(model, Beit):
        return None if model.rel_pos_bias is None else model.rel_pos_bias().detach()
    return _matrix(model.shared_rel_pos)


def _matrix(rel_pos: nn.Module | None) -> torch.Tensor | None:
    # a copy without dropout: that of the MLP is no part of its bias
    return None if rel_pos is None else copy.deepcopy(rel_pos).eval().get_bias()[0].detach()


def _read_back(matrix: torch.Tensor | None, model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """A bias (K, P+N, P+N) as table and prefix biases, which give it again."""
    assert matrix is not None
    p, grid = model.num_prefix_tokens, tuple(model.patch_embed.grid_size)
    index = []  # of a query and a key for every offset along an axis
    for size in grid:
        delta = torch.arange(1 - size, size, device=matrix.device)
        query = (-delta).clamp(min=0)
        index.append((query, query + delta))
    (y, to_y), (x, to_x) = index
    query, key = (a[:, None] * grid[1] + b for a, b in ((y, x), (to_y, to_x)))
    table = matrix[:, p:, p:][:, query, key]  # K, 2H-1, 2W-1
    again, found = expand_table(table, grid), {'table': table}
    if p:
        prefix = PrefixBias(matrix[:, p, :p], matrix[:, :p, p], matrix[:, :p, :p])
        again, found = prefixed_matrix(again, prefix), {**found, **prefix._asdict()}
    if not torch.equal(again, matrix):
        raise ValueError(f'cannot convert {name}: the bias is no function of the offset between two tokens')
    return {f'{name}.{part}': value.clone() for part, value in found.items()}
