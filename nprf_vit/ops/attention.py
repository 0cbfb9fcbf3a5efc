"""kernel_attention: checks its arguments once and hands them to the op.

# B batch, K heads, N tokens, M features, D head dim, H×W grid (N = H·W); a sequence is a 1×N grid
"""

import torch

from .attend_autograd import differentiable_attend
from .backends.interface import Case, Grid, Inputs, Whole
from .bias import Bias
from .checks import check_tensors, is_empty, is_whole
from .dispatch import BACKENDS, preferred, whole
from .key_mask import check_key_mask, hide_blind_rows, hide_keys
from .precision import check_alike, without_autocast
from .transforms import transformed


def kernel_attention(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
    backend: str = 'auto',
    positive: bool = True,
    cells: tuple[int, int] | int | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernelized attention with relative position bias, z_i = Σ_j a_ij v_j, a_ij ∝ exp(b_{j-i}) φq_i·φk_j (Eq. 10).

    All backends give the same numbers up to rounding; docs/math.md has the equations and docs/backends.md the ranges.

    Args:
        phi_q: (B, K, N, M) features of the queries.
        phi_k: (B, K, N, M) features of the keys. Without a bias and causality there may be more or fewer keys than
            queries (cross attention); then v and key_mask have as many tokens as phi_k.
        v: (B, K, N, D) values, in the features' dtype, or in half precision beside float32 features.
        bias: (K, 2H-1, 2W-1) with bias[h, dy+H-1, dx+W-1], (dy, dx) = key minus query; (K, 2N-1) without a grid.
        far: (K,) bias of all offsets outside the table, which may then be any odd-sized window, zero offset central.
        grid_size: (H, W), or None for a sequence.
        causal: Whether tokens see only themselves and earlier ones; sequences only.
        backend: A name of `dispatch.names()`; 'auto' takes the cheapest by `choose_backend`.
        positive: Whether all features are positive, which is so for every kind but 'trf'.
        cells: (h, w), or h for a sequence: the bias is between these cells, (K, 2h-1, 2w-1) or (K, 2h-1), and two
            tokens get that of the cells they lie in. Token (y, x) is in cell (⌊(y+½)h/H⌋, ⌊(x+½)w/W⌋).
        key_mask: (B, N) of bool; False keys are not attended to, whatever they and their values hold. A query that
            sees no key has the output 0 and no gradient.

    Returns:
        (B, K, N, D) in v's dtype. Sums run in float32, or float64 for float64 features, whatever autocast says.
    """
    grid, checked = check_arguments(phi_q, phi_k, v, bias, far, grid_size, causal, cells)
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    phi_q, phi_k = phi_q.to(dtype), phi_k.to(dtype)
    if key_mask is not None:
        check_key_mask(key_mask, (phi_k.shape[0], phi_k.shape[2]), phi_k.device)
        phi_k, v = hide_keys(phi_k, key_mask), hide_keys(v, key_mask)
    z = _attend(phi_q, phi_k, v, checked, grid, causal, backend, positive)
    return z if key_mask is None else hide_blind_rows(z, key_mask, causal)


def _attend(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: Bias | None,
    grid: Grid,
    causal: bool,
    backend: str,
    positive: bool,
) -> torch.Tensor:
    """`kernel_attention` of arguments that were checked."""
    case = Case.of(phi_q, v, bias, grid, causal, positive)
    table, far, cells = bias or (None, None, None)
    run = whole(backend, case, transformed(phi_q, phi_k, v, table, far))
    if run is not None and is_empty(phi_q):  # nothing to launch: the op gives empty outputs, and zeros to the bias
        run, backend = None, 'auto'
    with without_autocast(v):
        if run is not None:
            return run.attend(Inputs(phi_q, phi_k, v, bias), case)
        options = *grid, causal, positive, backend, *(cells or (0, 0))
        return differentiable_attend(phi_q, phi_k, v.to(phi_q.dtype), table, far, *options)[0].to(v.dtype)


def check_arguments(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    causal: bool,
    cells: tuple[int, int] | int | None,
) -> tuple[Grid, Bias | None]:
    """The grid, a sequence's as (1, N), and the bias of a call whose arguments fit each other."""
    check_tensors(phi_q=phi_q, phi_k=phi_k, v=v, bias=bias, far=far)
    _check_shapes(phi_q, phi_k, v)
    _check_cross(phi_q, phi_k, bias, grid_size, causal)
    grid = _check_grid(grid_size, phi_q.shape[2], causal)
    between = _check_cells(cells, bias, far, grid_size, grid, causal)
    return grid, _check_bias(phi_q, bias, far, grid_size, grid, between)


def packed_backend(backend: str, qkv: torch.Tensor, m: int, bias: Bias | None, causal: bool) -> Whole | None:
    """What takes a packed projection qkv (B, N, 3, K, D) with m normalized positive features, if `backend` does."""
    if transformed(qkv, *(() if bias is None else (bias.table, bias.far))):
        return None
    sizes, where = (m, qkv.shape[-1]), {'device': qkv.device.type, 'v_dtype': qkv.dtype}
    # of a grid that they do not fill: else the layer has none
    cells = None if bias is None or bias.cells is None else _as_grid(bias.cells)
    case = Case((1, qkv.shape[1]), *sizes, causal, bias is not None, **where, cells=cells)
    entry = preferred(case) if backend == 'auto' else BACKENDS[backend]
    if entry is None or not isinstance(entry.run, Whole) or entry.run.attend_packed is None or is_empty(qkv):
        return None
    return whole(backend, case)  # raises where it cannot run


def packed_attention(
    run: Whole,
    qkv: torch.Tensor,
    w: torch.Tensor,
    bias: Bias | None = None,
    grid_size: tuple[int, int] | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`kernel_attention` of normalized positive features straight from a packed projection.

    Args:
        run: What `packed_backend` returned.
        qkv: (B, N, 3, K, D) queries, keys and values in float32, bfloat16 or float16; any strides.
        w: (K, M, D) projections of the features, which get no gradient.
        bias: Table and far constant as in `kernel_attention`, like `grid_size` and `causal`.

    Returns:
        (B, N, K, D) in qkv's dtype.
    """
    heads = qkv[:, :, 0].transpose(1, 2)  # B, K, N, D
    table, far, _ = bias or (None, None, None)
    grid = _check_grid(grid_size, qkv.shape[1], causal)
    checked = _check_bias(heads, table, far, grid_size, grid)
    assert run.attend_packed is not None  # `packed_backend`
    case = Case(grid, w.shape[1], qkv.shape[-1], causal, bias is not None, device=qkv.device.type, v_dtype=qkv.dtype)
    return run.attend_packed(qkv, w.detach().float(), checked, case)


def _check_bias(
    phi_q: torch.Tensor,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    grid: Grid,
    cells: Grid | None = None,
) -> Bias | None:
    """The bias as (K, 2H-1, 2W-1), or as a window (K, 2R+1, 2S+1) with far (K,), in the sums' dtype; or None.

    With cells (h, w) as (K, 2h-1, 2w-1).
    """
    if bias is None:
        if far is not None:
            raise ValueError('far is the bias beyond a table: it needs bias, got bias=None')
        return None
    heads, (height, width) = phi_q.shape[1], cells or grid
    expected = (heads, 2 * height - 1, 2 * width - 1) if grid_size else (heads, 2 * width - 1)
    dtype = torch.promote_types(phi_q.dtype, torch.float32)
    for name, x in (('bias', bias), ('far', far)):
        if x is not None and x.device != phi_q.device:
            raise ValueError(f'{name} is on {x.device}, phi_q on {phi_q.device}: expected one device')
        if x is not None and (not x.is_floating_point() or torch.promote_types(x.dtype, torch.float32) != dtype):
            raise ValueError(f'{name} is {x.dtype}, phi_q {phi_q.dtype}: expected {dtype}')
    if far is None:
        if tuple(bias.shape) != expected:
            if cells is not None:
                where, others = f'{height}x{width} cells' if grid_size else f'{width} cells', ''
            else:
                where, others = f'a {height}x{width} grid' if grid_size else f'{width} tokens', ', or a window with far'
            raise ValueError(f'bias {tuple(bias.shape)} does not fit {where}: expected {expected}{others}')
        return Bias(bias.to(dtype).reshape(heads, 2 * height - 1, 2 * width - 1), None, cells)
    if bias.dim() != len(expected) or bias.shape[0] != heads or any(s % 2 == 0 for s in bias.shape[1:]):
        form = '(heads, 2R+1, 2S+1)' if grid_size else '(heads, 2R+1)'
        raise ValueError(f'bias {tuple(bias.shape)} is no window for {heads} heads: with far it must be {form}')
    if tuple(far.shape) != (heads,):
        raise ValueError(f'far {tuple(far.shape)} must have one value per head: expected ({heads},)')
    return Bias(bias.to(dtype).reshape(heads, -1, bias.shape[-1]), far.to(dtype))


def _check_cells(
    cells: tuple[int, int] | int | None,
    bias: torch.Tensor | None,
    far: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    grid: Grid,
    causal: bool,
) -> Grid | None:
    """Cells as (h, w), (1, h) on a sequence; or None."""
    if cells is None:
        return None
    if bias is None:
        raise ValueError(f'cells {cells} are those of a table: it needs bias, got bias=None')
    if far is not None:
        raise ValueError('cells and far are two ways to continue a table: expected one of them')
    if causal:
        raise ValueError(f'causal attention has no cells: expected cells=None, got {cells}')
    if grid_size is None:
        if isinstance(cells, (tuple, list)) or not is_whole(cells):
            raise ValueError(f'cells {cells} of a sequence of {grid[1]} tokens: expected a whole number')
        cells = (1, cells)
    elif not isinstance(cells, (tuple, list)) or len(cells) != 2 or not all(is_whole(s) for s in cells):
        raise ValueError(f'cells {cells} of a {grid[0]}x{grid[1]} grid: expected (h, w) in whole numbers')
    h, w = cells
    if not (1 <= h <= grid[0] and 1 <= w <= grid[1]):
        given = (h, w) if grid_size else w
        where, most = (f'{grid[0]}x{grid[1]} grid', grid) if grid_size else (f'sequence of {grid[1]} tokens', grid[1])
        raise ValueError(f'cells {given} do not fit a {where}: expected at least 1 and at most {most}')
    return h, w


def _as_grid(cells: tuple[int, ...]) -> Grid:
    """Cells (h, w), or (h,) of a sequence, as those of a grid."""
    h, w = cells if len(cells) == 2 else (1, *cells)
    return h, w


def _check_shapes(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f'phi_q {tuple(phi_q.shape)}, phi_k {tuple(phi_k.shape)}, v {tuple(v.shape)}'
    if phi_q.dim() != 4 or phi_k.dim() != 4 or v.dim() != 4:
        raise ValueError(f'phi_q, phi_k must be (B, heads, N, M) and v (B, heads, N, D), got {shapes}')
    if phi_q.shape[:2] != phi_k.shape[:2] or phi_q.shape[3] != phi_k.shape[3] or phi_k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f'batch and heads must agree, the features of phi_q and phi_k, and the tokens of phi_k and v: got {shapes}'
        )
    if min(*phi_q.shape[1:], *v.shape[1:]) < 1:
        raise ValueError(f'every dimension but the batch must be at least 1, got {shapes}')
    check_alike(phi_q, phi_k, v)


def _check_cross(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    bias: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    causal: bool,
) -> None:
    """Raise where queries and keys are of two sequences and something asks for the offset between them."""
    if phi_q.shape[2] == phi_k.shape[2]:
        return
    shapes = f'phi_q {tuple(phi_q.shape)} and phi_k {tuple(phi_k.shape)}'
    for name, given in (('bias', bias is not None), ('grid_size', grid_size is not None), ('causal', causal)):
        if given:
            raise ValueError(
                f'{name} is about the offset of a key from a query, and {shapes} are of sequences of different length: '
                f'expected {name}={False if name == "causal" else None}, or as many keys as queries'
            )


def _check_grid(grid_size: tuple[int, int] | None, n: int, causal: bool) -> Grid:
    if grid_size is None:
        return 1, n
    if causal:
        raise ValueError(f'causal attention runs over a sequence: expected grid_size=None, got {grid_size}')
    pair = isinstance(grid_size, (tuple, list)) and len(grid_size) == 2
    if not pair or not all(is_whole(s) for s in grid_size) or min(grid_size) < 1:
        raise ValueError(f'grid_size must be (H, W) with positive whole sizes, got {grid_size}')
    height, width = grid_size
    if height * width != n:
        raise ValueError(f'grid_size {height}x{width} holds {height * width} tokens, phi_q and v have {n}')
    return height, width
