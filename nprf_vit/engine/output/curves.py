"""curves.png: losses and accuracies over epochs, drawn from summary.csv alone."""

import importlib.util
from pathlib import Path

from .folder import read_rows

available = importlib.util.find_spec('matplotlib') is not None


def draw_curves(summary: Path, picture: Path) -> None:
    from matplotlib.figure import Figure

    rows = read_rows(summary)
    names = list(rows[0]) if rows else []
    losses = [name for name in names if name.endswith('loss')]
    metrics = [name for name in names if name.endswith(('top1', 'bpd'))]
    figure = Figure(figsize=(10, 4), layout='constrained')
    unit = 'bits/dim' if 'bpd' in names else 'top-1, %'
    for axes, chosen, label in zip(figure.subplots(1, 2), (losses, metrics), ('loss', unit)):
        for name in chosen:
            points = [(int(row['epoch']), float(row[name])) for row in rows if row[name]]
            axes.plot(*zip(*points), label=name) if points else None
        axes.set_xlabel('epoch')
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if chosen:
            axes.legend()
    figure.savefig(picture, dpi=100)
