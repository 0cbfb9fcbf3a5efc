"""curves.png: losses and a metric over epochs, drawn from summary.csv alone."""

import importlib.util
from pathlib import Path

from .csv_file import read_rows

available = importlib.util.find_spec('matplotlib') is not None


def draw_curves(summary: Path, picture: Path, metric: str, label: str) -> None:
    """Args:
    metric: Columns whose names end in it are drawn beside the losses.
    label: Of its axis.
    """
    from matplotlib.figure import Figure

    rows = read_rows(summary)
    names = list(rows[0]) if rows else []
    figure = Figure(figsize=(10, 4), layout='constrained')
    for axes, suffix, title in zip(figure.subplots(1, 2), ('loss', metric), ('loss', label)):
        chosen = [name for name in names if name.endswith(suffix)]
        for name in chosen:
            points = [(int(row['epoch']), float(row[name])) for row in rows if row[name]]
            axes.plot(*zip(*points), label=name) if points else None
        axes.set_xlabel('epoch')
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if chosen:
            axes.legend()
    figure.savefig(picture, dpi=100)
