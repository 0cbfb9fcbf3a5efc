"""`window` on an accelerator: dense products between neighbouring tiles, and sums over whole tiles for all the rest.

    Σ_j c_{j-i} s_ij v_j = Σ_{j in the tiles around i's} c_{j-i} s_ij v_j + c_far φq_i Σ_{j in other tiles} φk_jᵀ v_j

Tiles are as large as the window's radius, so beyond the 3×3 around a query's own every key has the far constant.
Nothing is subtracted, unlike in `window`: no bias is too steep, and the host has nothing to decide.

# B batch, K heads, N tokens, M features, E = D+1 value columns, H×W grid, window of offsets up to ±R, ±S; G = B·K
# Tiles of s = sy·sx tokens, L of them per head (`batched_tiles`); a strip is a row of a tile's neighbours
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from ..offsets import extend_table_backward, toeplitz_view
from . import linear
from .batched_tiles import Plan, Tiles, head_groups, sum_offsets, to_tiles, to_tokens

_TOP = 60.0  # log of the largest c, see `batched`


def product(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    far: torch.Tensor,
    p: Plan,
    scratch: int,
) -> torch.Tensor:
    """Σ_j c_{j-i} (φq_i·φk_j) [v_j, 1], (B, K, N, E)."""
    values = linear.with_ones(v)
    features = torch.cat([phi_q, phi_k], dim=-1).flatten(0, 1)  # G, N, 2M: laid out together
    c, near = _weights(bias, far, p)
    beyond = _beyond(p, v)
    out = torch.empty_like(values)
    for g, head in _groups(v, p, scratch, 1):
        q, k = to_tiles(features[g], p).columns(phi_q.shape[-1])
        value = to_tiles(values.flatten(0, 1)[g], p)
        sums = _far_sums(k.own, value.own, beyond, c[head, 0, 0])
        total = torch.bmm(q.own, sums)  # tiles, s, E
        for row in range(len(p.rows)):
            scores = torch.bmm(q.own, k.strip(row).transpose(1, 2))  # tiles, s, strip
            _weigh(scores, near[head], row, p)
            total.baddbmm_(scores, value.strip(row))
            del scores  # before the next row's are made
        to_tokens(total, p, out.flatten(0, 1)[g])
    return out


def product_backward(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    far: torch.Tensor,
    p: Plan,
    scratch: int,
    grad: torch.Tensor,
    bias_grad: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of phi_q, phi_k, v, bias and far, given grad (B, K, N, E); scores are computed again."""
    features, values = torch.cat([phi_q, phi_k], dim=-1).flatten(0, 1), linear.with_ones(v)
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k, values)]
    c, near = _weights(bias, far, p)
    beyond = _beyond(p, v)
    d_near = torch.zeros(v.shape[1], len(p.rows), p.size, p.strip, dtype=v.dtype, device=v.device)
    d_far = torch.zeros_like(far)
    for g, head in _groups(v, p, scratch, 2):
        tiles = to_tiles(features[g], p).columns(phi_q.shape[-1])
        tiles += [to_tiles(x.flatten(0, 1)[g], p) for x in (values, grad)]
        of_q, of_k, of_v, of_far = _far_backward(tiles, beyond, c[head, 0, 0])
        # only keys and values are added to as neighbours
        grads = [Tiles(of_q, 0, p.tiles[1], p), Tiles.around(of_k, p), Tiles.around(of_v, p)]
        for row in range(len(p.rows)):
            of_near = _row_backward(tiles, grads, near[head], row, p)
            if bias_grad:
                d_near[head, row].add_(of_near)
        if bias_grad:
            d_far[head].add_(of_far)
        for out, x in zip(outputs, (x.own for x in grads)):
            to_tokens(x, p, out.flatten(0, 1)[g])
    d_q, d_k, d_v = outputs
    d_v = d_v[..., :-1].contiguous()
    return d_q, d_k, d_v, *(_table_gradient(d_near, d_far, bias, p) if bias_grad else (None, None))


def _row_backward(tiles: list[Tiles], grads: list[Tiles], near: torch.Tensor, row: int, p: Plan) -> torch.Tensor:
    """Adds what one row of neighbours gives to the gradients; returns Σ of P = c·s·ds, (heads, s, strip)."""
    q, k, value, g = tiles
    scores = torch.bmm(q.own, k.strip(row).transpose(1, 2))  # tiles, s, strip
    _weigh(scores, near, row, p)
    d_scores = torch.bmm(g.own, value.strip(row).transpose(1, 2))
    for i, part in enumerate(scores.split(p.size, dim=2)):  # a tile may be added to once per launch
        grads[2].neighbour(row, i).baddbmm_(part.transpose(1, 2), g.own)
    of_near = scores.mul_(d_scores).unflatten(0, (-1, near.shape[0], p.tiles[0] * p.tiles[1])).sum((0, 2))
    _weigh(d_scores, near, row, p)
    grads[0].own.baddbmm_(d_scores, k.strip(row))
    for i, part in enumerate(d_scores.split(p.size, dim=2)):
        grads[1].neighbour(row, i).baddbmm_(part.transpose(1, 2), q.own)
    return of_near


def _far_backward(tiles: list[Tiles], beyond: torch.Tensor, c_far: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and values (tiles, s, ·) and of log c_far (heads,) through the sums over other tiles."""
    q, k, value, g = (x.own for x in tiles)
    sums = _far_sums(k, value, beyond, c_far)  # tiles, M, E
    d_sums = torch.bmm(q.transpose(1, 2), g)
    of_far = (d_sums * sums).unflatten(0, (-1, c_far.shape[0], beyond.shape[0])).sum((0, 2, 3, 4))
    d_state = _scaled_by_head(_over_tiles(beyond.t(), d_sums), c_far, beyond.shape[0])
    grads = torch.bmm(g, sums.transpose(1, 2)), torch.bmm(value, d_state.transpose(1, 2)), torch.bmm(k, d_state)
    return *grads, of_far


def _far_sums(k: torch.Tensor, value: torch.Tensor, beyond: torch.Tensor, c_far: torch.Tensor) -> torch.Tensor:
    """c_far Σ over the tiles t beyond each tile's neighbours of Σ_{j in t} φk_jᵀ v_j: (tiles, M, E)."""
    sums = _over_tiles(beyond, torch.bmm(k.transpose(1, 2), value))
    return _scaled_by_head(sums, c_far, beyond.shape[0])


def _over_tiles(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """matrix (L, L) times x (g·L, M, E), head by head."""
    heads = x.view(-1, matrix.shape[0], x.shape[1] * x.shape[2])  # g, L, M·E
    return torch.bmm(matrix.expand(heads.shape[0], -1, -1), heads).view(x.shape)


def _scaled_by_head(x: torch.Tensor, c_far: torch.Tensor, tiles: int) -> torch.Tensor:
    return x.view(-1, c_far.shape[0], tiles, *x.shape[1:]).mul_(c_far[:, None, None, None]).view(x.shape)


def _weights(bias: torch.Tensor, far: torch.Tensor, p: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """c (K, ·, ·) of the offsets between neighbouring tiles, and c between their tokens (K, sy, sx, keys y, keys x)."""
    c = scaled_exp(near_table(bias, far, p))
    keys = len(p.rows) * p.tile[0], len(p.cols) * p.tile[1]
    return c, toeplitz_view(c, p.tile, keys).flip(1, 2)


def near_table(bias: torch.Tensor, far: torch.Tensor, p: Plan) -> torch.Tensor:
    """The bias (K, ·, ·) of the offsets between neighbouring tiles."""
    if p.upright:
        bias = bias.transpose(1, 2)
    shape = [s * (len(near) + 1) - 1 for s, near in zip(p.tile, (p.rows, p.cols))]
    if p.causal:  # a tile of later keys, so that offset zero is central
        shape[0] += p.tile[0]
    table = far[:, None, None].expand(-1, *shape).clone()
    inner, outer = _overlap(bias.shape[1:], shape)
    table[:, outer[0], outer[1]] = bias[:, inner[0], inner[1]]
    if p.causal:
        table[:, shape[0] // 2 + 1 :] = -torch.inf
    return table


def _overlap(window: Sequence[int], table: Sequence[int]) -> tuple[list[slice], list[slice]]:
    """Slices of a window and of a table, both centred, that hold the same offsets."""
    inner = [slice(max(0, (w - t) // 2), min(w, (w + t) // 2)) for w, t in zip(window, table)]
    outer = [slice(max(0, (t - w) // 2), min(t, (t + w) // 2)) for w, t in zip(window, table)]
    return inner, outer


def scaled_exp(bias: torch.Tensor) -> torch.Tensor:
    """exp(b - max b + 60) of tables (K, ·, ·)."""
    return (bias - log_scale(bias)[:, :, None]).exp()


def log_scale(bias: torch.Tensor) -> torch.Tensor:
    """(K, 1): what `scaled_exp` takes out of its exponents."""
    return bias.amax((1, 2))[:, None].clamp(min=torch.finfo(bias.dtype).min) - _TOP


def _weigh(scores: torch.Tensor, near: torch.Tensor, row: int, p: Plan) -> None:
    """Scores (tiles, s, strip) times c, in place."""
    (sy, sx), heads = p.tile, near.shape[0]
    c = near[:, :, :, row * sy : (row + 1) * sy].unflatten(-1, (len(p.cols), sx)).transpose(3, 4)
    shape = -1, heads, p.tiles[0] * p.tiles[1], sy, sx, len(p.cols), sy, sx
    scores.view(shape).mul_(c.unsqueeze(1))


def _beyond(p: Plan, like: torch.Tensor) -> torch.Tensor:
    """(L, L): one where a tile of keys lies beyond the neighbours of a tile of queries, and not later if causal."""
    rows, cols = p.tiles
    table = torch.ones(1, 2 * rows - 1, 2 * cols - 1, dtype=like.dtype, device=like.device)
    near = [slice(n - 1 + near[0], n + near[-1]) for n, near in zip(p.tiles, (p.rows, p.cols))]
    table[:, near[0], near[1]] = 0
    if p.causal:
        table[:, rows:] = 0
    return toeplitz_view(table, p.tiles, p.tiles).flip(1, 2).reshape(rows * cols, rows * cols)


def _table_gradient(
    d_near: torch.Tensor, d_far: torch.Tensor, bias: torch.Tensor, p: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the window and of far, from Σ of P between neighbouring tiles (K, rows, s, strip)."""
    (sy, sx), rows, cols = p.tile, len(p.rows), len(p.cols)
    x = d_near.view(-1, rows, sy, sx, cols, sy, sx).permute(0, 2, 3, 1, 5, 4, 6)  # K, sy, sx, rows, sy, cols, sx
    x = x.flip(1, 2).reshape(-1, p.size, rows * cols * p.size)
    table = sum_offsets(x, p.tile, (rows * sy, cols * sx))  # K, (rows+1)·sy-1, (cols+1)·sx-1
    if p.causal:
        table = F.pad(table, (0, 0, 0, sy))
    half = (table.shape[1] + 1) // 2, (table.shape[2] + 1) // 2
    if p.upright:
        d_bias, outside = extend_table_backward(table.transpose(1, 2), bias, *half[::-1])
    else:
        d_bias, outside = extend_table_backward(table, bias, *half)
    return d_bias, d_far + outside


def _groups(v: torch.Tensor, p: Plan, scratch: int, arrays: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the G heads whose scores the scratch holds, and of the K heads of a table that they are."""
    heads, scores = v.shape[1], p.tiles[0] * p.tiles[1] * p.size * p.strip
    for g in head_groups(v.shape[0], heads, scratch // (arrays * v.dtype.itemsize * scores)):
        first = g.start % heads
        yield g, slice(first, first + min(g.stop - g.start, heads))
