"""Command line, result files and printed tables, shared by benchmarks and experiments.

What a quick run leaves says so: its files begin with `quick_`, its tables and pictures are labelled, and it keeps away
from docs/results.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nprf_vit.engine.output.csv_file import read_rows, write_rows

RESULTS = Path(__file__).parent.parent / 'docs' / 'results'
OUTPUT = Path('output')
QUICK, LABEL = 'quick_', 'quick run, not a result'


def options(doc: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='small sizes; writes nothing unless --output says where')
    parser.add_argument('--output', type=Path, help='folder for tables and pictures (default: a new one in output/)')
    return parser


def refuse(message: str) -> NoReturn:
    """Print the error and end with exit code 2, as for a wrong argument."""
    print(f'error: {message}', file=sys.stderr)
    raise SystemExit(2)


def fresh_folder(name: str, quick: bool = False) -> Path:
    """A folder under output/ that does not exist yet; its name ends with the time, so that the newest sorts last."""
    stem = f'{QUICK if quick else ""}{name}-{time.strftime("%Y%m%d-%H%M%S")}'
    folder, again = OUTPUT / stem, 1
    while folder.exists():
        again += 1
        folder = OUTPUT / f'{stem}-{again}'
    return folder


def shipped(folder: Path) -> bool:
    """Whether a folder is docs/results or in it."""
    return RESULTS.resolve() in (folder.resolve(), *folder.resolve().parents)


@dataclass
class Report:
    """Where the results of one command go, and whether it is a quick run, which gives none."""

    folder: Path | None
    quick: bool = False

    def __post_init__(self):
        if self.quick and self.folder is not None and shipped(self.folder):
            refuse(f'a quick run gives no results: choose another folder than {self.folder}')

    @classmethod
    def of(cls, args: argparse.Namespace, name: str) -> 'Report':
        """From parsed `options`: a new folder if none is given; a quick run writes only where asked to."""
        return cls(args.output or (None if args.quick else fresh_folder(name)), args.quick)

    def path(self, file: str) -> Path:
        return self.folder / f'{QUICK if self.quick else ""}{file}'

    def banner(self) -> None:
        """For reports that are not tables of markdown."""
        if self.quick:
            print(f'{LABEL}: sizes too small to mean anything')

    def table(self, rows: list[dict], title: str = '') -> None:
        if title:
            print(f'\n{title}\n')
        print(markdown(rows, LABEL if self.quick else ''))

    def save(self, tables: dict[str, list[dict]], plots: dict[str, Callable[[Path], None]] | None = None) -> None:
        """Tables as CSV files and pictures, by name, if there is a folder for them; says what was written."""
        if self.folder is None:
            return
        written = []
        for name, rows in tables.items():
            written.append(self.path(f'{name}.csv'))
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            write_rows(written[-1], rows)
        for name, plot in (plots or {}).items():
            written.append(self.path(f'{name}.png'))
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            plot(written[-1])
        print(f'wrote {", ".join(path.name for path in written)} in {self.folder}')


def save_figure(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a matplotlib figure; one of a quick run is labelled so across the picture."""
    if path.name.startswith(QUICK):
        look = {'ha': 'center', 'va': 'center', 'rotation': 10, 'color': 'red', 'alpha': 0.35, 'zorder': 100}
        figure.text(0.5, 0.5, LABEL, fontsize=3.5 * figure.get_figwidth(), **look)
    figure.savefig(path, dpi=dpi)


def read_csv(path: Path) -> list[dict]:
    """Rows of a table, numbers as numbers; none where there is no file yet."""
    if not path.exists():
        return []
    return [{key: _number(value) for key, value in row.items()} for row in read_rows(path)]


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def markdown(rows: list[dict], label: str = '') -> str:
    """The rows as a markdown table, with the label in its first header."""
    first, *names = map(str, rows[0])
    names = [f'{first} ({label})' if label else first, *names]
    lines = ['| ' + ' | '.join(names) + ' |', '|' + '---|' * len(names)]
    lines += ['| ' + ' | '.join(str(value) for value in row.values()) + ' |' for row in rows]
    return '\n'.join(lines)


def significant(value: float) -> str:
    """Three digits, zeros included: 0.0210, 20.0, 134."""
    return f'{value:#.3g}'.rstrip('.')


def by_size(rows: list[dict], name: Callable[[dict], str], size: str) -> list[dict]:
    """A row per contender and a column per size, for docs/: seconds and peak memory, or the reason for none."""
    sizes = list(dict.fromkeys(row[size] for row in rows))
    table = {}
    for row in rows:
        cell = row['seconds']
        if row['rounds']:
            cell = f'{significant(float(row["seconds"]))} s, {float(row["peak_mb"]):.0f} MB'
        table.setdefault(name(row), dict.fromkeys(sizes, ''))[row[size]] = cell
    return [{size: contender, **cells} for contender, cells in table.items()]
