"""Kernelized multi-head attention as a drop-in layer.

B batch, H×W grid or N tokens (N = H·W), C channels, K heads, D head dim, M features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import is_exportable, register_notrace_module
from torch import nn

from nprf_vit.ops import draw_projection, feature_map, kernel_attention
from nprf_vit.ops.attention import packed_attention, packed_backend
from nprf_vit.ops.backends.interface import Whole
from nprf_vit.ops.bias import AnyBias, Bias, DenseBias, PrefixedBias
from nprf_vit.ops.dispatch import names
from nprf_vit.ops.features import FEATURE_MAPS, plain_feature_map
from nprf_vit.ops.key_mask import hide_blind_rows, hide_keys
from nprf_vit.ops.prefix import prefix_attention

from .attention_checks import KERNELS as KERNELS
from .attention_checks import check_context, check_kernel, grid_of
from .key_mask import as_key_mask
from .plain_attention import checked_plain_attention
from .prefix_bias import make_rel_pos_bias
from .rel_pos import check_grid_size
from .softmax_attention import softmax_attention
from .tracing import keep_whole


def widen(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32; anything else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to length one, in float32 at least; zero stays zero, with a finite gradient."""
    return F.normalize(widen(x), dim=-1, eps=1e-6)


@register_notrace_module  # branches on the number of dimensions, which fx does not know while tracing
class KernelAttention(nn.Module):
    """Self-attention whose softmax is replaced by a feature map, with an optional relative position bias.

    Takes (B, H, W, C), reading the grid from the shape, or (B, N, C). Parameter names are those of timm's
    `Attention`, so its weights load; the projection `w` is a buffer of its own, drawn from (seed, depth).

    Args:
        dim: Number of input channels.
        num_heads: Number of attention heads.
        kernel: 'prf', 'orf', 'sphere', 'trf', 'elu', or 'softmax' for the attention they approximate.
        normalize: Give queries and keys length one (the paper's NPRF) instead of the scale D^-1/4 each.
        feature_dim: Number of random features M; 'elu' and 'softmax' have none.
        rel_pos_size: Learn a relative position bias of this layer's own, on a grid (H, W) or a sequence (N,).
        rel_pos_extend: How that bias serves larger grids, 'interpolate', 'extend', 'cells' or 'clip'; see
            `RelPosBias`.
        num_prefix_tokens: Tokens before the grid, such as class and register tokens, which that bias gives numbers of
            their own; see `PrefixRelPosBias`. Then x is (B, P+N, C).
        causal: No token sees a later one; sequences only.
        attn_backend: Algorithm of `nprf_vit.ops.kernel_attention`.
        seed: Seed of the projection.
        depth: Index of the layer, so that layers of one model draw different projections.
        head_dim: Channels per head, dim // num_heads unless given.
        qkv_bias: Add a bias to queries, keys and values.
        qk_norm: Apply a norm layer to queries and keys first.
        scale_norm: Apply a norm layer to the attention output.
        proj_bias: Add a bias to the output projection.
        attn_drop: Dropout of the attention weights; 'softmax' only, no other kernel has them at hand.
        proj_drop: Dropout of the output.
        norm_layer: Norm layer for qk_norm and scale_norm.

    Attributes:
        exportable: Whether attention runs in plain operators, which need no part of this package to be loaded; as
            `set_exportable` sets it, or timm's `create_model(..., exportable=True)`. docs/export.md.
    """

    exportable = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        kernel: str = 'prf',
        normalize: bool = True,
        feature_dim: int = 32,
        rel_pos_size: Sequence[int] | None = None,
        rel_pos_extend: str = 'interpolate',
        causal: bool = False,
        attn_backend: str = 'auto',
        seed: int = 0,
        depth: int = 0,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        check_kernel(kernel, feature_dim)
        if attn_backend not in names():
            raise ValueError(f'unknown attn_backend {attn_backend!r}: expected one of {", ".join(names())}')
        if head_dim is None and dim % num_heads:
            raise ValueError(f'dim {dim} is not divisible by num_heads {num_heads}')
        if attn_drop and kernel != 'softmax':
            raise ValueError(f'attn_drop {attn_drop} needs attention weights, which kernel {kernel!r} never forms')
        self.num_heads = num_heads
        self.head_dim = head_dim or dim // num_heads
        self.attn_dim = self.num_heads * self.head_dim
        self.kernel = kernel
        self.normalize = normalize
        self.feature_dim = feature_dim
        self.causal = causal
        self.attn_backend = attn_backend
        self.seed = seed
        self.depth = depth
        self.exportable = is_exportable()

        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(self.attn_dim, **dd) if scale_norm else nn.Identity()
        self.proj = nn.Linear(self.attn_dim, dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.rel_pos_bias = None
        if rel_pos_size is not None:
            check_grid_size(rel_pos_size, 'rel_pos_size')
            table = rel_pos_size, num_heads, kernel == 'softmax', rel_pos_extend
            self.rel_pos_bias = make_rel_pos_bias(*table, num_prefix_tokens, **dd)
        w = None
        if self.has_projection:
            w = torch.empty(num_heads, feature_dim, self.head_dim, device=device, dtype=torch.float32)
        self.register_buffer('w', w)
        self.reset_parameters()

    @property
    def has_projection(self) -> bool:
        """Whether the kernel has random features."""
        return self.kernel != 'softmax' and FEATURE_MAPS[self.kernel].projects

    def draw(self) -> torch.Tensor:
        """The projection that (seed, depth) stands for: (K, M, D), float32 on the CPU."""
        generator = torch.Generator('cpu').manual_seed((self.seed << 16) + self.depth)
        return draw_projection(self.num_heads, self.feature_dim, self.head_dim, kind=self.kernel, generator=generator)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projection; the layers within reset themselves."""
        if self.w is not None and not self.w.is_meta:
            self.w.copy_(self.draw())

    @keep_whole
    def forward(
        self,
        x: torch.Tensor,
        bias: AnyBias | torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        key_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Attend among the tokens of each item, or to those of a context.

        Args:
            x: (B, H, W, C) or (B, N, C); with tokens before the grid (B, P+N, C).
            bias: What a `RelPosBias` shared between layers returned for this grid, or a table of its offsets (with
                'softmax', a matrix (K, N, N)) as a tensor; none with a bias of its own.
            attn_mask: `key_mask` under the name that timm's blocks pass it by, also as (B, 1, 1, N).
            is_causal: As `causal`, for this call.
            key_mask: (B, N) or (B, H, W) of bool; no token attends to those that are False. Their own outputs are
                what they see of the others; a token that sees none has the output of zeros.
            context: (B, L, C) or (B, H', W', C): keys and values come from these tokens, by the same weights, and
                key_mask is one of them. No bias and no causality, which are about offsets within one sequence.
            grid_size: (H, W) of the tokens in x (B, P+N, C), for a bias of its own; that of the bias unless given.

        Returns:
            The shape of x.
        """
        if attn_mask is not None and key_mask is not None:
            raise ValueError('attn_mask and key_mask are two names of one mask: expected one of them')
        if bias is not None and self.rel_pos_bias is not None:
            raise ValueError('this layer has a relative position bias of its own: pass no other')
        mask = attn_mask if key_mask is None else key_mask
        causal = self.causal or is_causal
        if context is not None:
            check_context(x, context, bias is not None or self.rel_pos_bias is not None, causal)
            q, k, v = self.project(x, context)
            mask = as_key_mask(mask, (k.shape[0], k.shape[2]), k.device)
            return self._output(self._attend(q, k, v, None, q.shape[2:3], False, mask).transpose(1, 2), x)
        size = grid_of(x, self.rel_pos_bias, grid_size)
        if self.rel_pos_bias is not None:
            bias = self.rel_pos_bias(size, causal and x.ndim == 3)
        if causal and isinstance(bias, PrefixedBias):
            raise ValueError('tokens before a grid have no order: expected causal=False')
        if causal and x.ndim == 4:
            raise ValueError('causal attention needs an order: pass (B, N, C), not (B, H, W, C)')

        if isinstance(bias, torch.Tensor):
            bias = DenseBias(bias) if self.kernel == 'softmax' else Bias(bias)
        qkv = self._packed_projection(x)
        mask = as_key_mask(mask, qkv.shape[:2], qkv.device)
        packed = self._packed_backend(qkv, bias, causal, mask)
        if packed is not None:
            assert not isinstance(bias, (DenseBias, PrefixedBias))  # `_packed_backend`
            z = packed_attention(packed, qkv, self.w, bias, size if len(size) == 2 else None, causal)
        else:
            z = self._attend(*self._unpack(qkv), bias, size, causal, mask).transpose(1, 2)  # B, N, K, D
        return self._output(z, x)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: AnyBias | None,
        grid_size: tuple[int, ...],
        causal: bool,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """(B, K, N, D) of queries, keys and values."""
        if self.kernel != 'softmax':
            assert not isinstance(bias, DenseBias), f'{self.kernel} needs a table: expected a RelPosBias, not dense'
            return self._kernel_attention(q, k, v, bias, grid_size, causal, key_mask)
        assert bias is None or isinstance(bias, DenseBias), (
            'softmax adds a matrix to its scores: expected a dense RelPosBias'
        )
        if self.normalize:
            q, k = unit_norm(q).to(v.dtype), unit_norm(k).to(v.dtype)
        scale, drop = (1.0 if self.normalize else None), (self.attn_drop.p if self.training else 0.0)
        return softmax_attention(q, k, v, bias, causal, key_mask, scale, drop)

    def _output(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape of x, from heads (B, N, K, D)."""
        z = z.reshape(*x.shape[:-1], self.attn_dim)  # B, H, W, C or B, N, C
        return self.proj_drop(self.proj(self.norm(z)))

    def project(
        self, x: torch.Tensor, context: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, K, N, D) of tokens (B, ..., C), keys and values of the same or of a context."""
        if context is None:
            return self._unpack(self._packed_projection(x))
        parts = []
        for tokens, part in ((x, slice(self.attn_dim)), (context, slice(self.attn_dim, None))):
            if type(self.qkv) is nn.Linear:
                bias = None if self.qkv.bias is None else self.qkv.bias[part]
                y = F.linear(tokens, self.qkv.weight[part], bias)
            else:  # wrapped by somebody, as adapters do: not to be cut
                y = self.qkv(tokens)[..., part]
            parts.append(y.flatten(1, -2).unflatten(-1, (y.shape[-1] // self.attn_dim, self.num_heads, self.head_dim)))
        (q,), (k, v) = (y.permute(2, 0, 3, 1, 4).unbind(0) for y in parts)
        return self.q_norm(q), self.k_norm(k), v

    def _packed_projection(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values (B, N, 3, K, D) of tokens (B, ..., C), before any norm."""
        # by name, not by -1: an empty batch leaves it open
        return self.qkv(x).flatten(1, -2).unflatten(-1, (3, self.num_heads, self.head_dim))

    def _unpack(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (B, K, N, D) of a packed projection."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def features(
        self, q: torch.Tensor, k: torch.Tensor, causal: bool = False, key_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, K, N, M) of queries and keys, for `kernel_attention` or, token by token, `DecodeState`."""
        return self.query_features(q, causal), self.key_features(k, causal, key_mask)

    def query_features(self, q: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Features (B, K, N, M) of queries."""
        return self._features(q, 'query', causal)

    def key_features(self, k: torch.Tensor, causal: bool = False, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Features (B, K, N, M) of keys, zero where they are masked."""
        return self._features(k, 'key', causal, key_mask)

    def _features(self, x: torch.Tensor, role: str, causal: bool, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x if self.normalize else widen(x) * self.head_dim**-0.25
        to_features = plain_feature_map if self._is_plain() else feature_map
        return to_features(x, self.w, self.kernel, role, causal, self.normalize, key_mask)

    def _packed_backend(
        self, qkv: torch.Tensor, bias: AnyBias | None, causal: bool, key_mask: torch.Tensor | None
    ) -> Whole | None:
        """What takes the packed projection as it is, if the backend does; features by exp of unit vectors only.

        It makes features of all keys. With a mask the same backend gets features where those of some keys are zero.
        """
        if (
            self.kernel == 'softmax'
            or isinstance(bias, (DenseBias, PrefixedBias))
            or not FEATURE_MAPS[self.kernel].exponential
            or not self.normalize
            or key_mask is not None
        ):
            return None
        plain_norms = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        if not plain_norms or self._is_plain():
            return None
        return packed_backend(self.attn_backend, qkv, self.feature_dim, bias, causal)

    def _kernel_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: Bias | PrefixedBias | None,
        grid_size: tuple[int, ...],
        causal: bool,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        phi_q, phi_k = self.features(q, k, causal, key_mask)
        prefix = None
        if isinstance(bias, PrefixedBias):
            bias, prefix, grid_size = bias
        table, far, cells = bias or (None, None, None)
        options: dict[str, Any] = {
            'bias': table,
            'far': far,
            'grid_size': grid_size if len(grid_size) == 2 else None,
            'positive': FEATURE_MAPS[self.kernel].positive,
            'cells': cells if cells is None or len(cells) == 2 else cells[0],
        }
        if self._is_plain():
            return checked_plain_attention(phi_q, phi_k, v, prefix, causal, key_mask, options)
        if prefix is None:
            options |= {'causal': causal, 'key_mask': key_mask}
            return kernel_attention(phi_q, phi_k, v, backend=self.attn_backend, **options)
        if key_mask is not None:
            v = hide_keys(v, key_mask)  # elsewhere `kernel_attention` does it
        # masked keys have no features, hence no weight
        z = prefix_attention(phi_q, phi_k, v, prefix, backend=self.attn_backend, **options)
        return z if key_mask is None else hide_blind_rows(z, key_mask, causal)

    def _is_plain(self) -> bool:
        """Whether attention runs in plain operators: if asked for, and where ONNX has no name for ours."""
        return self.exportable or torch.onnx.is_in_onnx_export()

    def extra_repr(self) -> str:
        return (
            f'kernel={self.kernel}, normalize={self.normalize}, feature_dim={self.feature_dim}, '
            f'num_heads={self.num_heads}, causal={self.causal}, attn_backend={self.attn_backend}'
        )
