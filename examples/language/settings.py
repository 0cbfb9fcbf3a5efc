"""The settings of the language examples: what they are called, what they may be, and as options of a command."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError

S = TypeVar('S', bound='Settings')
T = TypeVar('T')


def key(default: Any, description: str, free: bool = False, least: float | None = None, most: float = math.inf) -> Any:
    """A setting; `free` ones may differ between a run and its continuation. Whole numbers are at least 1, others 0."""
    least = least if least is not None else 1 if isinstance(default, int) else 0
    return dataclasses.field(
        default=default, metadata={'help': description, 'free': free, 'least': least, 'most': most}
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the loop; each example adds those of its data and model, and its defaults are the paper's."""

    data_dir: str = key('', 'folder of the data', free=True)
    output: str = key('', 'folder of checkpoints and tables', free=True)
    steps: int = key(1, 'updates')
    warmup_steps: int = key(1, 'updates in which the learning rate rises from 0 to lr')
    lr: float = key(1e-3, 'peak learning rate')
    decay: str = key('inverse_sqrt', 'how it falls: inverse_sqrt, or linear to zero at the last step')
    beta2: float = key(0.98, "Adam's second beta; the first is 0.9")
    eps: float = key(1e-6, "Adam's epsilon")
    weight_decay: float = key(0.0, 'decoupled; none on biases, relative position biases and norms')
    clip_grad: float = key(0.0, 'largest norm of the gradient; 0: any')
    rel_pos_lr_scale: float = key(1.0, 'learning rate of the relative position bias, in units of lr')
    seed: int = key(0, 'of weights, order, dropout and random features', least=0)
    amp: str = key('none', 'autocast: none, bfloat16 or float16')
    accumulate: int = key(1, 'pieces into which each process cuts its part of a batch, to save memory', free=True)
    eval_interval: int = key(0, 'updates between validations; 0: at the end only', free=True, least=0)
    save_interval: int = key(1000, 'updates between checkpoints', free=True)
    log_interval: int = key(100, 'updates between lines of output', free=True)
    device: str = key('auto', 'auto, cpu, cuda, xpu or mps', free=True)
    threads: int = key(0, "CPU threads; 0: torch's choice", free=True, least=0)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, least, most = getattr(self, item.name), item.metadata['least'], item.metadata['most']
            if not isinstance(value, str) and not least <= value <= most:  # so NaN is refused too
                limits = f'at least {least}' if most == math.inf else f'{least} … {most}'
                raise InputError(f'{item.name} {value}: expected {limits}')
        self.check_choice('decay', ('inverse_sqrt', 'linear'))
        self.check_choice('amp', ('none', 'bfloat16', 'float16'))

    def check_choice(self, name: str, choices: Any) -> None:
        if getattr(self, name) not in choices:
            raise InputError(f'{name} {getattr(self, name)}: expected one of {", ".join(choices)}')

    def check_heads(self, dim: int, num_heads: int) -> None:
        if dim % num_heads:
            raise InputError(f'dim {dim} cannot be divided into num_heads {num_heads}: expected a multiple of it')

    def numbers(self, name: str, kind: Callable[[str], T]) -> list[T]:
        """The numbers of a setting that is a list of them, with commas between."""
        try:
            return [kind(word) for word in getattr(self, name).split(',')]
        except ValueError:
            raise InputError(f'{name} {getattr(self, name)}: expected numbers with commas between') from None

    def optimization(self) -> Config:
        """As the package's builders take it."""
        return Config(
            model='language',
            lr=self.lr,
            opt='adamw',  # Adam, whose weight decay is not divided by the gradient's size
            opt_betas=(0.9, self.beta2),
            opt_eps=self.eps,
            weight_decay=self.weight_decay,
            rel_pos_lr_scale=self.rel_pos_lr_scale,
            amp=self.amp != 'none',
            amp_dtype='float16' if self.amp == 'float16' else 'bfloat16',
        )


def parse(
    about: str, presets: Mapping[str, S], commands: tuple[str, ...], argv: list[str] | None
) -> tuple[str, S, bool]:
    """The command, the settings, and whether to resume."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('command', nargs='?', choices=commands, default=commands[0])
    parser.add_argument('--preset', choices=tuple(presets), default=next(iter(presets)), help='defaults of the rest')
    parser.add_argument('--resume', action='store_true', help='continue the run in the output folder')
    default = next(iter(presets.values()))
    for item in dataclasses.fields(default):
        shown = getattr(default, item.name)
        kind = {'type': type(shown), 'default': argparse.SUPPRESS, 'metavar': type(shown).__name__.upper()}
        text = f'{item.metadata["help"]} ({shown})' if shown != '' else item.metadata['help']
        parser.add_argument('--' + item.name.replace('_', '-'), **kind, help=text.replace('%', '%%'))
    given = vars(parser.parse_args(argv))
    command, preset, resume = given.pop('command'), given.pop('preset'), given.pop('resume')
    settings = dataclasses.replace(presets[preset], **given)
    for name in ('data_dir', 'output'):
        if not getattr(settings, name):
            raise InputError(f'--{name.replace("_", "-")} is missing')
    return command, settings, resume
