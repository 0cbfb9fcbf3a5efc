"""What a configuration has to know of a task: its metrics, and the keys that mean nothing to it.

The task itself is in nprf_vit/engine/tasks, in one table with the same names.
"""

from dataclasses import dataclass

_AUGMENTATION: tuple[str, ...] = (
    'scale',
    'ratio',
    'hflip',
    'vflip',
    'color_jitter',
    'aa',
    'aug_repeats',
    'reprob',
    'mixup',
    'cutmix',
)
_AUGMENTATION += ('smoothing', 'crop_pct', 'crop_mode')


@dataclass(frozen=True)
class TaskKeys:
    """Args:
    eval_metrics: What the best checkpoint may be chosen by.
    unused: Keys that must keep their defaults, because nothing would read them.
    why: The reason, for the message.
    """

    eval_metrics: tuple[str, ...]
    unused: tuple[str, ...] = ()
    why: str = ''


TASK_KEYS = {
    'classification': TaskKeys(('top1', 'loss')),
    'pixel': TaskKeys(
        ('bpd', 'loss'), (*_AUGMENTATION, 'num_classes', 'real_labels', 'mean', 'std'), 'bytes stay as they are'
    ),
}


def eval_metrics() -> tuple[str, ...]:
    """Of all tasks, each of the model and of its moving average."""
    names = dict.fromkeys(name for task in TASK_KEYS.values() for name in task.eval_metrics)
    return tuple(prefix + name for name in names for prefix in ('', 'ema_'))
