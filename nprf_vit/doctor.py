"""Is this installation sound, and which algorithm wins on this machine?

python -m nprf_vit.doctor            every backend against the dense oracle, then timed over sizes
python -m nprf_vit.doctor --quick    the same checks, small sizes
python -m nprf_vit.doctor --seconds N    time for about N seconds; larger sizes are left out, and named
python -m nprf_vit.doctor --csv F    what was found, as a table too
python -m nprf_vit.doctor --targets sm_80,sm_90,sm_100,gfx942 [--json F]    compile the kernels for these GPUs instead

# B batch, K heads, N tokens, M features, D head dim, H×W grid
"""

import argparse
import itertools
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from tqdm import tqdm

from .diagnosis import peers
from .diagnosis.cases import CASES, Case, Finding
from .diagnosis.device import examine
from .engine.output.csv_file import write_rows
from .errors import first_line
from .ops import dispatch, kernel_attention, reference
from .ops.backends import fused_support, interface
from .ops.backends.fft import FFT_POINTS
from .version import __version__

# What docs/backends.md promises: of Σ_j a_ij|v_j| on every output element, and of the norm of each gradient.
OUTPUT = {torch.float32: 1e-3, torch.float64: 1e-8, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
GRADIENT = {torch.float32: 2e-3, torch.float64: 1e-6, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
TIMED_HEADS, TIMED_M, TIMED_D, RADIUS, CELLS = 4, 32, 64, 13, 14
OPTIONAL = 'flex'  # needs a compiler that not every machine has; auto never takes it
HALF = (torch.float32, torch.bfloat16, torch.float16)
ON_GPU = {'fused': HALF, OPTIONAL: (torch.float32,)}  # with the dtypes of v that are checked


def relative_error(case: Case, backend: str, dtype: torch.dtype, device: str) -> float:
    """The largest error of the output and of the gradients, in units of what is promised."""
    tensors = case.tensors(dtype)
    options: dict[str, Any] = {'grid_size': case.grid, 'causal': case.causal, 'cells': case.cells}
    graded = backend != 'step'  # decoding has no gradients
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    mine = {name: x.to(device).requires_grad_(graded) for name, x in tensors.items()}
    weights = reference.attention_weights(**{k: x for k, x in exact.items() if k != 'v'}, **options)
    expected, scale = weights @ exact['v'], weights.detach() @ exact['v'].detach().abs()
    z = kernel_attention(**mine, **options, backend=backend)
    errors = [((z.detach().cpu().double() - expected.detach()).abs() / scale).max().item() / OUTPUT[dtype]]
    if graded:
        upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(z, list(mine.values()), upstream.to(z))
        oracle = torch.autograd.grad(expected, list(exact.values()), upstream)
        largest = max(g.norm() for g in oracle)
        for g, o in zip(grads, oracle):
            # a gradient that is zero in truth, such as that of a one-entry bias, is held against the others
            norm = o.norm() if o.norm() > 1e-12 * largest else largest
            errors.append(((g.cpu().double() - o).norm() / norm).item() / GRADIENT[dtype])
    return max(e if math.isfinite(e) else math.inf for e in errors)  # max alone may pass over a nan


def check(device: str) -> tuple[list[Finding], list[str]]:
    """Prints a line per backend; returns the largest error of each that is sound, and what is wrong."""
    right: list[Finding] = []
    wrong: list[str] = []
    for backend in ('direct', 'fft', 'linear', 'window', 'cells', 'step', 'auto', *ON_GPU):
        if backend in ON_GPU and device == 'cpu':
            print(f'  {backend:<8}not on cpu')
            continue
        dtypes = ON_GPU.get(backend, (torch.float32, torch.float64))
        trials = [(case, dtype) for case in CASES if backend in case.backends for dtype in dtypes]
        try:
            errors = {f'{c.name}, {str(dtype)[6:]}': relative_error(c, backend, dtype, device) for c, dtype in trials}
        except Exception as error:  # whatever a broken installation raises is the diagnosis
            reason = f'{type(error).__name__}: {first_line(error)}'
            print(f'  {backend:<8}{"not available" if backend == OPTIONAL else "FAILED"}: {reason}')
            wrong += [] if backend == OPTIONAL else [f'{backend} on {device}: {reason}']
            continue
        where = max(errors, key=errors.__getitem__)
        sound = errors[where] <= 1
        print(f'  {backend:<8}{"ok" if sound else "WRONG":<6}{len(errors):>3} checks, ', end='')
        print(f'largest error {errors[where]:.2g} of the allowed ({where})')
        if sound:
            right.append(Finding(device, backend, 'error, of the allowed', where, errors[where]))
        else:
            wrong.append(f'{backend} on {device} is off by {errors[where]:.2g} times the allowed error ({where})')
    return right, wrong


def timed_runs(side: int, device: str, backends: list[str]) -> dict[str, Callable]:
    """One forward pass of each algorithm that serves a grid; all have a bias but `linear` and PyTorch's own, `sdpa`."""
    torch.manual_seed(0)
    phi_q, phi_k = (torch.rand(1, TIMED_HEADS, side**2, TIMED_M, device=device) for _ in range(2))
    v = torch.randn(1, TIMED_HEADS, side**2, TIMED_D, device=device)
    bias = torch.randn(TIMED_HEADS, 2 * side - 1, 2 * side - 1, device=device) * 0.02
    middle = slice(max(0, side - 1 - RADIUS), side + RADIUS)
    tables: dict[str, dict[str, Any]] = {
        name: {'bias': bias} for name in ('direct', 'fft', 'window', 'linear', 'fused', OPTIONAL)
    }
    tables['window'] = {'bias': bias[:, middle, middle], 'far': torch.zeros(TIMED_HEADS, device=device)}
    cells = min(side, CELLS)
    tables['cells'] = {'bias': bias[:, : 2 * cells - 1, : 2 * cells - 1], 'cells': (cells, cells)}
    tables['linear'] = {}
    grid = side, side

    def attend(backend: str) -> Callable[[], torch.Tensor]:
        return lambda: kernel_attention(phi_q, phi_k, v, **tables[backend], grid_size=grid, backend=backend)

    runs = {backend: attend(backend) for backend in tables if backend in backends}
    if device != 'cpu':  # by name it is a dense product there
        runs['fft'] = lambda: peers.fft_attention(phi_q, phi_k, v, bias, grid)
    q, k = (torch.randn(1, TIMED_HEADS, side**2, TIMED_D, device=device) for _ in range(2))
    return runs | {'sdpa': lambda: peers.softmax_attention(q, k, v)}


def median_seconds(runs: dict[str, Callable], device: str, rounds: int) -> dict[str, float]:
    """Seconds of a call after a first one, contenders in turn so that a busy neighbour slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if device != 'cpu':
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(s[1:]) for name, s in seconds.items()}


def first_fft(point: float, device: str = 'cpu') -> int:
    """Side of the smallest square grid on which the cost model has fft ahead, were FFT_POINT what is given."""

    def faster(side: int) -> bool:
        costs = dispatch.count(interface.Case((side, side), TIMED_M, TIMED_D, device=device))
        return costs['fft'] * point / FFT_POINTS[device] < costs['direct']

    return next(side for side in itertools.count(2) if faster(side))


def time_sizes(device: str, backends: list[str], sides: list[int], rounds: int, seconds: float) -> dict[int, dict]:
    """Seconds of each backend by size, from the smallest on until the next would go beyond `seconds` in all.

    A size is expected to take (n'/n)² of the time of the one before, n its tokens; the smallest is always timed.
    """
    table: dict[int, dict[str, float]] = {}
    begin, last = time.perf_counter(), 0.0
    for side in tqdm(sides, desc=f'timing on {device}', leave=False):
        started = time.perf_counter()
        if table and started - begin + last * (side / max(table)) ** 4 > seconds:
            break
        with torch.no_grad():
            table[side] = median_seconds(timed_runs(side, device, backends), device, rounds)
        last = time.perf_counter() - started
    left_out = [f'{side}x{side}' for side in sides if side not in table]
    if left_out:
        print(f'left out to stay within {seconds:g} seconds: {", ".join(left_out)} (--seconds N gives more)')
    return table


def time_backends(
    device: str, backends: list[str], sides: list[int], rounds: int, seconds: float = math.inf
) -> list[Finding]:
    """Prints milliseconds by size, the winner, and the constant of the cost model that follows; returns them.

    The constant matters where fft and direct (on CUDA fused) are close, so the two sizes at which they are closest give
    it.
    """
    dense = 'fused' if 'fused' in backends else 'direct'
    table = time_sizes(device, backends, sides, rounds, seconds)
    names = list(table[sides[0]])
    print(f'milliseconds on {device}, {TIMED_HEADS} heads, M={TIMED_M}, D={TIMED_D}, forward, float32:')
    print(f'  {"grid":<10}' + ''.join(f'{name:>10}' for name in names) + '   fastest for any bias   auto takes')
    fitted = {}
    for side, took in table.items():
        served = {name: s for name, s in took.items() if name not in ('window', 'cells', 'linear', 'sdpa')}
        auto = dispatch.choose_backend((side, side), TIMED_M, TIMED_D, False, True, device=device)
        cells = ''.join(f'{took[name] * 1e3:>10.2f}' for name in names)
        print(f'  {f"{side}x{side}":<10}{cells}   {min(served, key=served.__getitem__):<22} {auto}')
        point = dispatch.fitted_fft_point((side, side), TIMED_M, TIMED_D, took['fft'], took[dense], device)
        fitted[abs(math.log(took['fft'] / took[dense]))] = point
    print(f'  window: a bias constant beyond {RADIUS} tokens; cells: {CELLS}x{CELLS} of them; linear and sdpa: no bias')
    point = statistics.geometric_mean([fitted[key] for key in sorted(fitted)[:2]])
    used = FFT_POINTS[device]
    here, built_in = first_fft(point, device), first_fft(used, device)
    print(f'  FFT_POINT {used} in use (ops/backends/fft.py): {dense} is behind fft from {built_in}x{built_in} on')
    print(f'  FFT_POINT {point:.1f} measured here: it would be from {here}x{here} on', end='')
    rough = min(fitted) > math.log(3)
    print(' (rough: no size timed has the two within a factor of 3)' if rough else '')
    if not rough and not 1 / 1.5 < point / used < 1.5:
        print(f'  to change: FFT_POINTS[{device!r}] = {point:.1f} in nprf_vit/ops/backends/fft.py; please report it')
    times = [Finding(device, b, 'seconds', f'{side}x{side}', s) for side in table for b, s in table[side].items()]
    return [*times, Finding(device, 'fft', 'FFT_POINT', '', point), Finding(device, 'fft', 'first side', '', here)]


def examine_all(device: str, backends: list[str]) -> tuple[list[Finding], list[str]]:
    """Prints a line per backend: a training step's bits, and on CUDA memory, host reads and graphs; what is wrong."""
    findings, wrong = [], []
    for backend in backends:
        found = examine(backend, device)
        if found is None:
            continue
        print(f'  {backend:<8}{found}')
        findings += [Finding(device, backend, name, '14x14', x) for name, x in found.quantities().items()]
        wrong += [f'{backend} on {device}: {fault}' for fault in found.faults()]
    if device == 'cpu':
        print('  memory, host reads and graph capture: on CUDA only')
    return findings, wrong


def compile_for(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Compiles every variant of the kernels, with --quick a few; 1 if one spills or does not fit where it must."""
    if not fused_support.AVAILABLE:
        parser.error('--targets needs Triton, which is not installed here')
    from .ops.kernels import report, variants  # imports Triton

    try:
        targets = report.check_targets(args.targets)
    except ValueError as error:
        parser.error(str(error))
    if args.json and not args.json.parent.is_dir():
        parser.error(f'--json {args.json}: there is no folder {args.json.parent}')
    return report.run(targets, variants.FEW if args.quick else list(variants.variants()), args.json)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.doctor', description=__doc__.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='time small sizes only')
    parser.add_argument(
        '--seconds', type=float, default=120, metavar='N', help='time per device, checks apart (default 120)'
    )
    parser.add_argument('--csv', type=Path, metavar='FILE', help='write errors and times there too')
    parser.add_argument(
        '--targets', metavar='NAMES', help='compile the Triton kernels for sm_80, sm_90, sm_100, gfx942; runs nothing'
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='with --targets, write every compilation there')
    args = parser.parse_args(argv)
    if args.targets:
        return compile_for(parser, args)
    if args.json:
        parser.error('--json goes with --targets')
    if not args.seconds > 0:
        parser.error(f'--seconds {args.seconds:g}: expected a number above 0')
    if args.csv and not args.csv.parent.is_dir():
        parser.error(f'--csv {args.csv}: there is no folder {args.csv.parent}')
    devices = ['cpu'] + (['cuda'] if torch.cuda.is_available() else [])
    versions = {'nprf_vit': __version__, 'torch': torch.__version__, 'timm': timm.__version__}
    versions['Python'] = platform.python_version()
    print(', '.join(f'{name} {version}' for name, version in versions.items()))
    print(torch.get_num_threads(), 'CPU threads,', torch.cuda.get_device_name() if devices[1:] else 'no CUDA device')
    sides, rounds = ([8, 14, 20], 2) if args.quick else ([14, 28, 56, 80, 112, 144], 3)
    findings: list[Finding] = []
    wrong: list[str] = []
    for device in devices:
        print(f'against the dense oracle on {device}:')
        right, found = check(device)
        findings, wrong = findings + right, wrong + found
        if found:  # the time of a wrong answer says nothing
            continue
        backends = [finding.backend for finding in right]
        print(f'a training step of each on {device}:')
        more, found = examine_all(device, backends)
        findings, wrong = findings + more, wrong + found
        findings += time_backends(device, backends, sides, rounds, args.seconds)
    if args.csv:
        write_rows(args.csv, [{**asdict(finding), 'value': f'{finding.value:.4g}'} for finding in findings])
    if wrong:
        print(f'NOT SOUND: {"; ".join(wrong)}')
        return 1
    print(f'sound: every backend on {" and ".join(devices)} agrees with the dense oracle')
    return 0


if __name__ == '__main__':
    sys.exit(main())
