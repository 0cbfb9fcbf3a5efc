"""The keys of a run, their types, defaults and ranges. Names are timm's wherever timm has one."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .model_kwargs import check_model_kwargs


def _key(default: Any = dataclasses.MISSING, *, low=None, high=None, choices=None, free=False) -> Any:
    """A configuration key. `free`: may differ between a run and its continuation, because no result depends on it."""
    metadata = {'low': low, 'high': high, 'choices': choices, 'free': free}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_AUGMENTATION = ('scale', 'ratio', 'hflip', 'vflip', 'color_jitter', 'aa', 'aug_repeats', 'reprob', 'mixup', 'cutmix')
_AUGMENTATION += ('smoothing', 'crop_pct', 'crop_mode')


@dataclass(frozen=True)
class Config:
    """One run. `None` means "off", or "what the model says" where a model has an opinion."""

    # model
    model: str = _key()
    task: str = _key('classification', choices=('classification', 'pixel'))
    img_size: int | None = _key(None, low=1, high=16384)
    in_chans: int = _key(3, choices=(1, 3))
    num_classes: int | None = _key(None, low=1, high=10_000_000)
    drop: float = _key(0.0, low=0, high=1)
    drop_path: float = _key(0.0, low=0, high=1)
    model_kwargs: dict = _key({})  # any further argument of the model, by its name in the model's signature
    pretrained: bool = _key(False)
    initial_checkpoint: str | None = _key(None)

    # data
    # '' image folder or tar, 'digits', or a name that timm.data.create_dataset reads; task pixel: see data/pixels.py
    dataset: str = _key('')
    data_dir: str | None = _key(None, free=True)
    train_split: str = _key('train')
    val_split: str = _key('validation')
    dataset_download: bool = _key(False, free=True)
    train_images: int | None = _key(None, low=1, high=2**31 - 1)  # expected counts: an incomplete copy is refused
    val_images: int | None = _key(None, low=1, high=2**31 - 1)
    workers: int = _key(4, low=0, high=512, free=True)
    pin_mem: bool = _key(True, free=True)
    mean: tuple[float, ...] | None = _key(None)
    std: tuple[float, ...] | None = _key(None)
    real_labels: str | None = _key(None, free=True)  # 'bundled' or a JSON file: ImageNet ReaL labels

    # augmentation
    no_aug: bool = _key(False)
    scale: tuple[float, ...] = _key((0.08, 1.0))
    ratio: tuple[float, ...] = _key((3 / 4, 4 / 3))
    hflip: float = _key(0.5, low=0, high=1)
    vflip: float = _key(0.0, low=0, high=1)
    color_jitter: float | None = _key(None, low=0, high=10)
    aa: str | None = _key(None)
    aug_repeats: int = _key(1, low=1, high=64)
    train_interpolation: str = _key('bicubic', choices=('bicubic', 'bilinear', 'nearest', 'lanczos', 'random'))
    reprob: float = _key(0.0, low=0, high=1)
    remode: str = _key('pixel', choices=('pixel', 'rand', 'const'))
    recount: int = _key(1, low=1, high=64)
    mixup: float = _key(0.0, low=0, high=1000)
    cutmix: float = _key(0.0, low=0, high=1000)
    mixup_prob: float = _key(1.0, low=0, high=1)
    mixup_switch_prob: float = _key(0.5, low=0, high=1)
    mixup_mode: str = _key('batch', choices=('batch', 'pair', 'elem'))
    mixup_block: int = _key(8, low=2, high=65536)  # images mixed with one another; divides every per-device batch
    mixup_off_epoch: int = _key(0, low=0, high=1_000_000)  # from this epoch on no mixing; 0: never off
    smoothing: float = _key(0.0, low=0, high=0.999)

    # evaluation
    crop_pct: float = _key(0.875, low=0.01, high=1)
    crop_mode: str = _key('center', choices=('center', 'squash', 'border'))
    interpolation: str = _key('bicubic', choices=('bicubic', 'bilinear', 'nearest', 'lanczos'))
    validation_batch_size: int | None = _key(None, low=1, high=65536)
    val_interval: int = _key(1, low=1, high=1_000_000)
    val_limit: int | None = _key(None, low=1, high=2**31 - 1)  # so many validation images, evenly spread; None: all
    eval_metric: str = _key('top1', choices=('top1', 'ema_top1', 'loss', 'ema_loss', 'bpd', 'ema_bpd'))

    # batches
    global_batch: int = _key(1024, low=1, high=10_000_000)
    batch_size: int = _key(128, low=1, high=65536, free=True)  # at most, per device; accumulation makes up the rest

    # optimization
    epochs: int = _key(300, low=1, high=1_000_000)
    epoch_steps: int | None = _key(None, low=1, high=10**9)  # steps that count as an epoch; None: a pass over the data
    opt: str = _key('adamw')
    lr: float | None = _key(None, low=0, high=1000)  # the peak, as written: never scaled by the batch
    opt_betas: tuple[float, ...] | None = _key(None)
    opt_eps: float | None = _key(None, low=0, high=1)
    weight_decay: float = _key(0.0, low=0, high=1000)
    momentum: float = _key(0.9, low=0, high=1)
    layer_decay: float | None = _key(None, low=0, high=1)
    rel_pos_lr_scale: float = _key(1.0, low=0, high=1000)  # of relative position biases, in units of lr
    clip_grad: float | None = _key(None, low=0, high=1e9)
    clip_mode: str = _key('norm', choices=('norm', 'value', 'agc'))
    sched: str = _key('cosine', choices=('cosine', 'tanh', 'step', 'poly', 'inverse_sqrt'))
    warmup_epochs: int = _key(0, low=0, high=1_000_000)
    warmup_lr: float = _key(1e-5, low=0, high=1000)
    min_lr: float = _key(0.0, low=0, high=1000)
    decay_epochs: int = _key(90, low=1, high=1_000_000)
    decay_rate: float = _key(0.1, low=0, high=100)
    model_ema: bool = _key(False)
    model_ema_decay: float = _key(0.9999, low=0, high=1)
    model_ema_warmup: bool = _key(False)

    # precision and speed
    device: str = _key('auto', choices=('auto', 'cpu', 'cuda'), free=True)
    threads: int | None = _key(None, low=1, high=1024, free=True)  # CPU threads per process; None: torch's choice
    amp: bool = _key(False)
    amp_dtype: str = _key('bfloat16', choices=('bfloat16', 'float16'))
    torchcompile: str | None = _key(None)  # a torch.compile backend, such as inductor
    grad_checkpointing: bool = _key(False)

    # the run
    seed: int = _key(42, low=0, high=2**63 - 1)
    log_interval: int = _key(50, low=1, high=10**9)
    tensorboard: bool = _key(False, free=True)

    # faults; docs/reliability.md
    recovery_interval: int = _key(0, low=0, high=10**9, free=True)  # steps between checkpoints within an epoch; 0: none
    checkpoint_minutes: float = _key(30.0, low=0, high=1e6, free=True)  # minutes between them; 0: none
    checkpoint_hist: int = _key(3, low=1, high=1000, free=True)  # how many are kept: last.pt, last-1.pt, ...
    checkpoint_patience: int = _key(5, low=0, high=1_000_000, free=True)  # failed writes in a row that a run survives
    max_skipped_steps: int = _key(10, low=1, high=1_000_000, free=True)  # non-finite steps in a row at which it stops
    max_bad_images: int = _key(100, low=0, high=1_000_000, free=True)  # unreadable training images that it survives
    max_pixels: int = _key(89_478_485, low=1, high=178_956_970)  # larger images are not decoded; PIL's own limits
    stall_timeout: float = _key(1800.0, low=1, high=604_800, free=True)  # seconds in one phase until a rank is reported

    def __post_init__(self) -> None:
        if self.mixup_block % 2 and self.mixes:
            raise InputError(f'mixup_block {self.mixup_block} must be even: images are mixed in pairs')
        for name, low in (('scale', 0.0), ('ratio', 0.0)):
            pair = getattr(self, name)
            if len(pair) != 2 or not low < pair[0] <= pair[1]:
                raise InputError(f'{name} {list(pair)} must be two numbers [smallest, largest] above 0')
        for name in ('mean', 'std'):
            values = getattr(self, name)
            if values is not None and len(values) != self.in_chans:
                raise InputError(f'{name} has {len(values)} entries: expected in_chans = {self.in_chans}')
        if self.std is not None and min(self.std) <= 0:
            raise InputError(f'std {list(self.std)} must be above 0')
        counts = re.findall(r'-[nwd](\d+)', self.aa or '')
        if any(len(count) > 2 or int(count) > 32 for count in counts):
            raise InputError(f'aa {self.aa} repeats its operations more than 32 times')
        if self.opt_betas is not None and not (len(self.opt_betas) == 2 and all(0 <= b < 1 for b in self.opt_betas)):
            raise InputError(f'opt_betas {list(self.opt_betas)} must be two numbers in [0, 1)')
        if self.eval_metric.startswith('ema_') and not self.model_ema:
            raise InputError(f'eval_metric {self.eval_metric} needs model_ema: true')
        if self.warmup_epochs >= self.epochs and self.warmup_epochs:
            raise InputError(f'warmup_epochs {self.warmup_epochs} must be below epochs {self.epochs}')
        self._check_task()
        check_model_kwargs(self.model_kwargs)

    def _check_task(self) -> None:
        metrics = {'pixel': ('bpd', 'loss'), 'classification': ('top1', 'loss')}[self.task]
        if self.eval_metric.removeprefix('ema_') not in metrics:
            raise InputError(f'task {self.task} has no eval_metric {self.eval_metric}: expected {", ".join(metrics)}')
        if self.task != 'pixel':
            return
        for name in (*_AUGMENTATION, 'num_classes', 'real_labels', 'mean', 'std'):
            item = next(f for f in dataclasses.fields(self) if f.name == name)
            if getattr(self, name) != item.default:
                raise InputError(f'{name} {getattr(self, name)} means nothing to task pixel: bytes stay as they are')

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def eval_batch(self) -> int:
        return self.validation_batch_size or self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings: for YAML, JSON and checkpoints."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys on which results depend and in which two resolved configurations differ, as readable lines."""
    lines = []
    for name, item in FIELDS.items():
        there, here = (values.get(name, item.default) for values in (old, new))  # older files lack newer keys
        if not item.metadata['free'] and there != here:
            lines.append(f'{name}: {there} there, {here} here')
    return lines
