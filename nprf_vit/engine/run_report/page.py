"""The report of one or several runs as one HTML file."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nprf_vit.config.schema import FIELDS
from nprf_vit.engine.output.atomic_file import write_text
from nprf_vit.engine.output.numbers import duration
from nprf_vit.engine.output.report import model_title
from nprf_vit.engine.tasks.registry import task_of
from nprf_vit.html_page.build import build_page

from .read_run import Column, RunRecord, read_run

FOLDER = Path(__file__).parent
SCRIPTS = ('curves.js', 'details.js', 'report.js')
POINTS = 1500  # of a curve: more than a screen has columns
LISTED = 30  # skipped steps, bad images
NAME = 'report.html'


def report_page(runs: Sequence[RunRecord]) -> str:
    data = {'runs': [_describe(run) for run in runs], 'settings': _settings(runs), 'several': len(runs) > 1}
    scripts = [FOLDER / name for name in SCRIPTS]
    title = f'Training of {", ".join(run.name for run in runs)}'
    return build_page(title, FOLDER / 'report.html', [FOLDER / 'report.css'], scripts, data)


def write_report(folder: Path) -> None:
    """The report of a run into its own folder."""
    write_text(folder / NAME, report_page([read_run(folder)]))


def _describe(run: RunRecord) -> dict[str, Any]:
    task = task_of(run.config)
    return {
        'name': run.name,
        'state': run.state,
        'model': model_title(run.config),
        'metric': {'name': task.curve.metric, 'label': task.curve.label},
        'facts': _facts(run),
        'epochs': run.epochs,
        'steps': {name: _thin(column) for name, column in run.steps.items()},
        'skipped': {'total': _total(run.epochs.get('skipped', [])), 'first': [_skip(s) for s in run.skipped[:LISTED]]},
        'bad_images': {'total': len(run.bad_images), 'first': run.bad_images[:LISTED]},
        'biases': run.biases,
        'hard_images': run.hard_images,
    }


def _facts(run: RunRecord) -> list[dict[str, str]]:
    """What stands in the table at the top, in its order."""
    metric = run.config.eval_metric
    values = [(value, i) for i, value in enumerate(run.epochs.get(metric, [])) if value is not None]
    facts = {'state': run.state}
    if values:
        best, at = (max if metric.endswith('top1') else min)(values, key=lambda pair: pair[0])
        facts[f'best {metric}'] = f'{best:.5g} after epoch {int(run.epochs["epoch"][at] or 0)}'
        facts[f'last {metric}'] = f'{values[-1][0]:.5g}'
    speeds = [value for value in run.epochs.get('images_per_s', []) if value is not None]
    waits = [value for value in run.epochs.get('data_wait', []) if value is not None]
    if speeds:
        facts['images/s, median'] = f'{statistics.median(speeds):.0f}'
    if waits:
        facts['waiting for data'] = f'{statistics.mean(waits):.1%}'
    facts['time'] = duration(sum(value or 0 for value in run.epochs.get('seconds', [])))
    facts['skipped steps'] = str(_total(run.epochs.get('skipped', [])))
    facts['bad images'] = str(len(run.bad_images))
    facts['starts'] = str(len(run.launches)) if run.launches else 'not on record'
    if run.launches:
        last = run.launches[-1]
        facts['on'] = f'{last.get("world_size", "?")} × {last.get("device", "?")}'
        facts['with'] = f'nprf_vit {last.get("nprf_vit")}, torch {last.get("torch")}, timm {last.get("timm")}'
        facts['commit'] = str(last.get('commit') or 'not known')[:12]
    return [{'name': name, 'value': value} for name, value in facts.items()]


def _settings(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The keys in which runs differ; of one run, those that are not at their defaults."""
    configs = [run.config.to_dict() for run in runs]
    rows = []
    for name, item in FIELDS.items():
        values = [config[name] for config in configs]
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        differs = any(value != values[0] for value in values) if len(runs) > 1 else values[0] not in (default, {})
        if differs:
            rows.append({'key': name, 'values': [_shown(value) for value in values]})
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ', '.join(f'{name}: {inner}' for name, inner in value.items()) or 'none'
    if isinstance(value, list):
        return ', '.join(map(str, value))
    return 'none' if value is None else str(value)


def _skip(record: dict[str, Any]) -> dict[str, Any]:
    suspects = record.get('suspects') or []
    return {'step': record.get('step'), 'reason': str(record.get('reason')), 'suspects': suspects[:8]}


def _total(column: Column) -> int:
    return int(sum(value or 0 for value in column))


def _thin(column: Column) -> Column:
    """Means of neighbours, so that there are at most POINTS."""
    width = math.ceil(len(column) / POINTS)
    if width <= 1:
        return column
    groups = ([v for v in column[i : i + width] if v is not None] for i in range(0, len(column), width))
    return [statistics.mean(group) if group else None for group in groups]
