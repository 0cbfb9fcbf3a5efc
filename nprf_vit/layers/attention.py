"""Kernelized multi-head attention as a drop-in layer.

B batch, H×W grid or N tokens (N = H·W), C channels, K heads, D head dim, M features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import nn

from nprf_vit.ops import draw_projection, feature_map, kernel_attention
from nprf_vit.ops.attention import packed_attention, packed_backend
from nprf_vit.ops.backends.dense import dense_kernel_attention
from nprf_vit.ops.backends.interface import Whole
from nprf_vit.ops.bias import Bias, DenseBias
from nprf_vit.ops.dispatch import names
from nprf_vit.ops.features import FEATURE_MAPS

from .rel_pos import RelPosBias, check_grid_size, extend_window

KERNELS = (*FEATURE_MAPS, 'softmax')


def widen(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32; anything else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to length one, in float32 at least; zero stays zero, with a finite gradient."""
    return F.normalize(widen(x), dim=-1, eps=1e-6)


def check_kernel(kernel: str, feature_dim: int = 1) -> None:
    """Raise for an unknown kernel, or for a number of features below 1."""
    if not isinstance(feature_dim, int) or feature_dim < 1:
        raise ValueError(f'feature_dim {feature_dim!r}: expected a whole number above 0')
    known = (*FEATURE_MAPS, 'softmax')
    if kernel not in known:
        raise ValueError(f'unknown kernel {kernel!r}: expected one of {", ".join(known)}')


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
        rel_pos_extend: How that bias serves larger grids, 'interpolate', 'extend' or 'cells'; see `RelPosBias`.
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
    """

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
            self.rel_pos_bias = RelPosBias(rel_pos_size, num_heads, kernel == 'softmax', rel_pos_extend, **dd)
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

    def forward(
        self,
        x: torch.Tensor,
        bias: Bias | DenseBias | torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend among the tokens of each item.

        Args:
            x: (B, H, W, C) or (B, N, C).
            bias: What a `RelPosBias` shared between layers returned for this grid, or a table of its offsets (with
                'softmax', a matrix (K, N, N)) as a tensor; none with a bias of its own.
            attn_mask: Not supported; in the signature because timm's blocks pass it.
            is_causal: As `causal`, for this call.

        Returns:
            The shape of x.
        """
        if attn_mask is not None:
            raise ValueError('KernelAttention takes no attn_mask: pass a relative position bias, or causal=True')
        if bias is not None and self.rel_pos_bias is not None:
            raise ValueError('this layer has a relative position bias of its own: pass no other')
        grid_size = self._grid_size(x)
        if self.rel_pos_bias is not None:
            bias = self.rel_pos_bias(grid_size)
        causal = self.causal or is_causal
        if causal and x.ndim == 4:
            raise ValueError('causal attention needs an order: pass (B, N, C), not (B, H, W, C)')

        if isinstance(bias, torch.Tensor):
            bias = DenseBias(bias) if self.kernel == 'softmax' else Bias(bias)
        qkv = self._packed_projection(x)
        packed = self._packed_backend(qkv, bias, causal)
        if packed is not None:
            assert not isinstance(bias, DenseBias)  # `_packed_backend`
            z = packed_attention(packed, qkv, self.w, bias, grid_size if len(grid_size) == 2 else None, causal)
        elif self.kernel == 'softmax':
            assert not isinstance(bias, Bias), 'softmax adds a matrix to its scores: expected a dense RelPosBias'
            z = self._softmax_attention(*self._unpack(qkv), bias, grid_size, causal).transpose(1, 2)  # B, N, K, D
        else:
            assert not isinstance(bias, DenseBias), f'{self.kernel} needs a table: expected a RelPosBias, not dense'
            z = self._kernel_attention(*self._unpack(qkv), bias, grid_size, causal).transpose(1, 2)  # B, N, K, D
        z = z.reshape(*x.shape[:-1], self.attn_dim)  # B, H, W, C or B, N, C
        return self.proj_drop(self.proj(self.norm(z)))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (B, K, N, D) of tokens (B, ..., C)."""
        return self._unpack(self._packed_projection(x))

    def _packed_projection(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values (B, N, 3, K, D) of tokens (B, ..., C), before any norm."""
        return self.qkv(x).reshape(x.shape[0], -1, 3, self.num_heads, self.head_dim)

    def _unpack(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (B, K, N, D) of a packed projection."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def features(self, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, K, N, M) of queries and keys, for `kernel_attention` or, token by token, `DecodeState`."""
        if not self.normalize:
            q, k = (widen(x) * self.head_dim**-0.25 for x in (q, k))
        options: dict[str, Any] = {'kind': self.kernel, 'causal': causal, 'normalize': self.normalize}
        return feature_map(q, self.w, role='query', **options), feature_map(k, self.w, role='key', **options)

    def _grid_size(self, x: torch.Tensor) -> tuple[int, ...]:
        """(H, W) of a grid, or (N,) of a sequence; a sequence under a 2-D bias of its own is that bias's grid."""
        if x.ndim == 4:
            return tuple(x.shape[1:3])
        if x.ndim != 3:
            raise ValueError(f'expected (B, H, W, C) or (B, N, C), got {tuple(x.shape)}')
        if self.rel_pos_bias is not None and len(self.rel_pos_bias.grid_size) == 2:
            h, w = self.rel_pos_bias.grid_size
            if h * w != x.shape[1]:
                raise ValueError(f'{x.shape[1]} tokens do not fill the {h}x{w} grid of the bias: pass (B, H, W, C)')
            return (h, w)
        return (x.shape[1],)

    def _softmax_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: DenseBias | None,
        grid_size: tuple[int, ...],
        causal: bool,
    ) -> torch.Tensor:
        if self.normalize:
            q, k = unit_norm(q).to(v.dtype), unit_norm(k).to(v.dtype)
        matrix = None
        if bias is not None:
            matrix = bias.matrix.to(q.dtype)
            if causal:
                n = q.shape[-2]
                future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
                matrix, causal = matrix.masked_fill(future, float('-inf')), False
        dropout_p = self.attn_drop.p if self.training else 0.0
        scale = 1.0 if self.normalize else None
        return F.scaled_dot_product_attention(q, k, v, matrix, dropout_p, is_causal=causal, scale=scale)

    def _packed_backend(self, qkv: torch.Tensor, bias: Bias | DenseBias | None, causal: bool) -> Whole | None:
        """What takes the packed projection as it is, if the backend does; features by exp of unit vectors only."""
        if (
            self.kernel == 'softmax'
            or isinstance(bias, DenseBias)
            or not FEATURE_MAPS[self.kernel].exponential
            or not self.normalize
        ):
            return None
        plain_norms = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        if not plain_norms or torch.onnx.is_in_onnx_export():
            return None
        return packed_backend(self.attn_backend, qkv, self.feature_dim, bias, causal)

    def _kernel_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: Bias | None,
        grid_size: tuple[int, ...],
        causal: bool,
    ) -> torch.Tensor:
        phi_q, phi_k = self.features(q, k, causal)
        table, far, cells = bias or (None, None, None)
        if torch.onnx.is_in_onnx_export():
            table = table if far is None else extend_window(table, far, grid_size)
            return dense_kernel_attention(phi_q, phi_k, v, table, grid_size, causal, cells)
        return kernel_attention(
            phi_q,
            phi_k,
            v,
            bias=table,
            far=far,
            grid_size=grid_size if len(grid_size) == 2 else None,
            causal=causal,
            backend=self.attn_backend,
            positive=FEATURE_MAPS[self.kernel].positive,
            cells=cells if cells is None or len(cells) == 2 else cells[0],
        )

    def extra_repr(self) -> str:
        return (
            f'kernel={self.kernel}, normalize={self.normalize}, feature_dim={self.feature_dim}, '
            f'num_heads={self.num_heads}, causal={self.causal}, attn_backend={self.attn_backend}'
        )
