"""Compiles the kernels for named GPUs and says what came of it: registers, spills, shared memory, tensor cores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .compile import SHARED_LIMIT, TARGETS, Compiled, compile_launch
from .launch import Launch
from .variants import Variant, launches_of

_MUST_NOT_SPILL = ('sm_80', 'sm_90')


def distinct_launches(variants: Iterable[Variant]) -> dict[tuple[Any, ...], tuple[Variant, Launch]]:
    """One launch of each kind: kernel, constants and types."""
    found: dict[tuple[Any, ...], tuple[Variant, Launch]] = {}
    for variant in variants:
        for launch in (x for part in launches_of(variant) for x in part):
            names = launch.kernel.arg_names
            constants = tuple(launch.arguments[n] for n, p in zip(names, launch.kernel.params) if p.is_constexpr)
            types = tuple(getattr(launch.arguments[n], 'dtype', None) for n in names)
            found.setdefault((launch.kernel.__name__, constants, types, launch.num_warps), (variant, launch))
    return found


def compile_variants(variants: Iterable[Variant], targets: list[str]) -> list[dict[str, Any]]:
    """A row per kernel and target; `variant` is the first layer that has this launch, `fits` whether it can run."""
    rows = []
    work = [(target, *x) for target in targets for x in distinct_launches(variants).values()]
    for target, variant, launch in tqdm(work, desc='compiling', leave=False):
        row = {'kernel': launch.kernel.__name__, 'target': target, 'variant': str(variant)}
        try:
            compiled = compile_launch(launch, target)
        except Exception as error:  # whatever a compiler raises is the finding
            rows.append(row | {'error': f'{type(error).__name__}: {str(error).strip().splitlines()[-1:]}'})
            continue
        rows.append(row | {name: getattr(compiled, name) for name in Compiled._fields[2:]})
    return rows


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What keeps a row from being good: it does not compile or fit, or spills where it must not."""
    found = []
    for row in rows:
        where = f'{row["kernel"]} on {row["target"]} ({row["variant"]})'
        if 'error' in row:
            found.append(f'{where} does not compile: {row["error"]}')
        elif row['shared_bytes'] > SHARED_LIMIT[row['target']]:
            found.append(f'{where} needs {row["shared_bytes"]} bytes of shared memory')
        elif row['spill_bytes'] and row['target'] in _MUST_NOT_SPILL:
            found.append(f'{where} spills {row["spill_bytes"]} bytes')
    return found


def check_targets(names: str) -> list[str]:
    """'sm_80,sm_90' as a list; raises for a target that is not known."""
    targets = [name.strip() for name in names.split(',') if name.strip()]
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        raise ValueError(f'unknown target {", ".join(unknown) or names!r}: expected some of {", ".join(TARGETS)}')
    return targets


def run(targets: list[str], variants: Iterable[Variant], path: Path | None) -> int:
    """Prints a line per kernel and target, the worst of its variants, writes all rows as JSON; 1 if one has a fault."""
    rows = compile_variants(variants, targets)
    print(f'{"kernel":<22}{"target":<8}{"variants":>9}{"registers":>11}{"spilled":>9}{"shared":>9}  tensor cores')
    for kernel, target in dict.fromkeys((row['kernel'], row['target']) for row in rows):
        mine = [row for row in rows if (row['kernel'], row['target']) == (kernel, target) and 'error' not in row]
        if not mine:
            continue
        registers, spilled, shared = (max(r[x] for r in mine) for x in ('registers', 'spill_bytes', 'shared_bytes'))
        cores = {len(mine): 'yes', 0: 'no'}.get(sum(row['tensor_cores'] for row in mine), 'some')
        print(f'{kernel:<22}{target:<8}{len(mine):>9}{registers:>11}{spilled:>9}{shared:>9}  {cores}')
    if path:
        path.write_text(json.dumps(rows, indent=1) + '\n', encoding='utf-8')
    wrong = faults(rows)
    for fault in wrong:
        print(f'FAULT: {fault}')
    print(f'{len(rows)} compilations, {len(wrong)} faults; compiled here, not run')
    return 1 if wrong else 0
