"""What the experiments' pictures have in common."""

from experiments.runs import mean_and_spread


def dots(
    axes, at: float, values: list[float], color: str = 'C0', label: str | None = None, across: bool = False
) -> None:
    """Every run as a dot, and their mean with the deviation between them; along x if across."""
    if not values:
        return
    mean, spread = mean_and_spread(values)
    runs, middle = ([at] * len(values), values), ([at], [mean])
    axes.scatter(*(runs[::-1] if across else runs), color=color, alpha=0.4, s=18)
    bar = {'xerr' if across else 'yerr': [spread if len(values) > 1 else 0]}
    axes.errorbar(*(middle[::-1] if across else middle), **bar, fmt='D', ms=5, color=color, capsize=4, label=label)
