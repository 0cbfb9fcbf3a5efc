"""The keys of a run, their types, defaults and ranges. Names are timm's wherever timm has one."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from nprf_vit.errors import InputError

from .model_kwargs import check_model_kwargs
from .task_keys import TASK_KEYS, eval_metrics

DEVICES = ('auto', 'cpu', 'cuda', 'xpu', 'mps')


def _key(
    default: Any,
    description: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    free: bool = False,
) -> Any:
    """A configuration key.

    Args:
        description: One sentence for `--help` and docs/configuration.md.
        low, high, choices: What values are allowed; for several numbers, of each.
        free: It may differ between a run and its continuation, because no result depends on it.
    """
    metadata = {'description': description, 'low': low, 'high': high, 'choices': choices, 'free': free}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """One run. `None` means "off", or the model's own value where it has one."""

    # model
    model: str = _key(dataclasses.MISSING, "Name of the model in timm's registry, such as nprf_deit_base.")
    task: str = _key(
        'classification',
        'What is learned: the class of an image, or its bytes one by one.',
        choices=tuple(TASK_KEYS),
    )
    img_size: int | tuple[int, ...] | None = _key(
        None,
        'Side of the square input in pixels, or [height, width]; null: what the model was made for.',
        low=1,
        high=16384,
    )
    in_chans: int = _key(3, 'Colour channels of the input.', choices=(1, 3))
    num_classes: int | None = _key(None, "Classes to tell apart; null: the model's own number.", low=1, high=10_000_000)
    drop: float = _key(0.0, 'Dropout rate inside the model.', low=0, high=1)
    drop_path: float = _key(
        0.0, 'Stochastic depth: rate at which the last block is skipped, less for earlier ones.', low=0, high=1
    )
    model_kwargs: dict = _key(
        {},
        'Further arguments of the model, by their names in its signature; --set model_kwargs.depth=4 sets one.',
    )
    pretrained: bool = _key(False, "Start from the weights that timm's registry has for this model.")
    initial_checkpoint: str | None = _key(
        None, 'Start from the weights in this file: .pt, .pth or .safetensors, of ours, DeiT or timm.'
    )

    # data
    dataset: str = _key(
        '',
        "'' for an image folder or tar file, digits, or a name that timm reads (torch/..., wds/..., hfds/...); for "
        'task pixel: imagenet32_chrabaszcz, imagenet32_vandenoord, arrays or digits.',
    )
    data_dir: str | None = _key(None, 'Folder of the data; --data-dir sets it.', free=True)
    train_split: str = _key('train', 'Name of the training split.')
    val_split: str = _key('validation', 'Name of the validation split.')
    dataset_download: bool = _key(False, 'Let torchvision or timm download the dataset if it is missing.', free=True)
    train_images: int | None = _key(
        None, 'Number of training images expected: an incomplete copy is refused.', low=1, high=2**31 - 1
    )
    val_images: int | None = _key(
        None, 'Number of validation images expected: an incomplete copy is refused.', low=1, high=2**31 - 1
    )
    workers: int = _key(4, 'Processes per device that read and augment images.', low=0, high=512, free=True)
    pin_mem: bool = _key(True, 'Copy batches to a GPU from page-locked memory.', free=True)
    mean: tuple[float, ...] | None = _key(
        None, "Mean of each channel that inputs are normalized by; null: the model's."
    )
    std: tuple[float, ...] | None = _key(
        None, "Standard deviation of each channel that inputs are normalized by; null: the model's."
    )
    real_labels: str | None = _key(None, "Also measure on ImageNet's ReaL labels: bundled, or a JSON file.", free=True)

    # augmentation
    no_aug: bool = _key(False, 'Resize and crop the centre only: no random augmentation.')
    scale: tuple[float, ...] = _key((0.08, 1.0), 'Smallest and largest share of the area that a random crop takes.')
    ratio: tuple[float, ...] = _key((3 / 4, 4 / 3), 'Smallest and largest aspect ratio of a random crop.')
    hflip: float = _key(0.5, 'Probability of a mirror image.', low=0, high=1)
    vflip: float = _key(0.0, 'Probability of an image upside down.', low=0, high=1)
    color_jitter: float | None = _key(
        None, 'Strength of random changes of brightness, contrast and saturation; ignored with aa.', low=0, high=10
    )
    aa: str | None = _key(None, "Automatic augmentation in timm's notation, such as rand-m9-mstd0.5-inc1; null: none.")
    aug_repeats: int = _key(
        1, 'How many differently augmented copies of an image share a global batch.', low=1, high=64
    )
    train_interpolation: str = _key(
        'bicubic', 'Resampling of training images.', choices=('bicubic', 'bilinear', 'nearest', 'lanczos', 'random')
    )
    reprob: float = _key(0.0, 'Probability that a random rectangle is erased.', low=0, high=1)
    remode: str = _key(
        'pixel',
        'What an erased rectangle is filled with: noise per pixel, one random colour, or zero.',
        choices=('pixel', 'rand', 'const'),
    )
    recount: int = _key(1, 'Rectangles erased at most per image.', low=1, high=64)
    mixup: float = _key(0.0, 'Alpha of mixup; 0: off.', low=0, high=1000)
    cutmix: float = _key(0.0, 'Alpha of cutmix; 0: off.', low=0, high=1000)
    mixup_prob: float = _key(1.0, 'Probability that a block is mixed at all.', low=0, high=1)
    mixup_switch_prob: float = _key(0.5, 'Probability of cutmix instead of mixup where both are on.', low=0, high=1)
    mixup_mode: str = _key(
        'batch', 'One mixing coefficient per block (batch), pair or image (elem).', choices=('batch', 'pair', 'elem')
    )
    mixup_block: int = _key(
        8, 'Images mixed with one another; even, and a divisor of every per-device batch.', low=2, high=65536
    )
    mixup_off_epoch: int = _key(0, 'Epoch from which on nothing is mixed; 0: never off.', low=0, high=1_000_000)
    smoothing: float = _key(0.0, 'Label smoothing.', low=0, high=0.999)

    # evaluation
    crop_pct: float = _key(
        0.875, 'Share of the side that the centre crop of a validation image takes.', low=0.01, high=1
    )
    crop_mode: str = _key(
        'center',
        'How a validation image is cropped: its centre, squashed to the input, or with a border.',
        choices=('center', 'squash', 'border'),
    )
    interpolation: str = _key(
        'bicubic', 'Resampling of validation images.', choices=('bicubic', 'bilinear', 'nearest', 'lanczos')
    )
    validation_batch_size: int | None = _key(
        None, 'Images per device and step in validation; null: batch_size.', low=1, high=65536
    )
    val_interval: int = _key(1, 'Epochs between validations; the last epoch always has one.', low=1, high=1_000_000)
    val_limit: int | None = _key(None, 'Validate on so many images, evenly spread; null: all.', low=1, high=2**31 - 1)
    eval_metric: str = _key(
        'top1',
        'What the best checkpoint is chosen by; ema_ is of the moving average.',
        choices=eval_metrics(),
    )

    # batches
    global_batch: int = _key(
        1024, 'Images per update over all devices; the number of devices never changes it.', low=1, high=10_000_000
    )
    batch_size: int = _key(
        128, 'Images per device and forward pass at most; accumulation makes up the rest.', low=1, high=65536, free=True
    )

    # optimization
    epochs: int = _key(300, 'Epochs to train.', low=1, high=1_000_000)
    epoch_steps: int | None = _key(
        None, 'Updates that count as an epoch; null: one pass over the data.', low=1, high=10**9
    )
    opt: str = _key('adamw', "Optimizer, by its name in timm's registry.")
    lr: float | None = _key(
        None, 'Peak learning rate, as written and never scaled by the batch; training needs it.', low=0, high=1000
    )
    opt_betas: tuple[float, ...] | None = _key(None, 'Betas of the optimizer; null: its own.')
    opt_eps: float | None = _key(None, 'Epsilon of the optimizer; null: its own.', low=0, high=1)
    weight_decay: float = _key(0.0, 'Weight decay; none on biases, norms and position tables.', low=0, high=1000)
    momentum: float = _key(0.9, 'Momentum of optimizers that have one.', low=0, high=1)
    layer_decay: float | None = _key(
        None, 'Factor of the learning rate from each block to the one below; null: off.', low=0, high=1
    )
    rel_pos_lr_scale: float = _key(
        1.0, 'Learning rate of the relative position biases, in units of lr.', low=0, high=1000
    )
    clip_grad: float | None = _key(None, 'Limit of the gradient; null: none.', low=0, high=1e9)
    clip_mode: str = _key(
        'norm',
        'What is limited: the norm of all gradients, each value, or adaptively by the norm of the weights (agc).',
        choices=('norm', 'value', 'agc'),
    )
    sched: str = _key(
        'cosine',
        'How the learning rate falls after the warm-up.',
        choices=('cosine', 'tanh', 'step', 'poly', 'inverse_sqrt'),
    )
    warmup_epochs: int = _key(
        0, 'Epochs in which the learning rate rises from warmup_lr to lr; below epochs.', low=0, high=1_000_000
    )
    warmup_lr: float = _key(1e-5, 'Learning rate before the first update of the warm-up.', low=0, high=1000)
    min_lr: float = _key(0.0, 'Lower limit of the learning rate.', low=0, high=1000)
    decay_epochs: int = _key(90, 'Epochs between falls of the learning rate, for sched step.', low=1, high=1_000_000)
    decay_rate: float = _key(0.1, 'Factor of each fall for sched step; exponent for sched poly.', low=0, high=100)
    model_ema: bool = _key(False, 'Keep and measure a moving average of the weights.')
    model_ema_decay: float = _key(0.9999, 'Share of the old average at each update.', low=0, high=1)
    model_ema_warmup: bool = _key(False, 'Begin with a faster average.')

    # precision and speed
    device: str = _key(
        'auto',
        'Where to compute; auto: the accelerator that torch finds (CUDA or ROCm as cuda, XPU, MPS), else the CPU.',
        choices=DEVICES,
        free=True,
    )
    threads: int | None = _key(None, "CPU threads per process; null: torch's choice.", low=1, high=1024, free=True)
    amp: bool = _key(False, 'Compute matrix products in half precision (autocast).')
    amp_dtype: str = _key(
        'bfloat16', 'The half precision of amp; float16 scales its losses.', choices=('bfloat16', 'float16')
    )
    torchcompile: str | None = _key(None, 'Backend of torch.compile, such as inductor; null: not compiled.')
    grad_checkpointing: bool = _key(False, 'Compute activations twice instead of storing them: less memory, more time.')

    # the run
    seed: int = _key(42, 'Seed of weights, order, augmentation and dropout.', low=0, high=2**63 - 1)
    log_interval: int = _key(50, 'Updates between rows of steps.csv.', low=1, high=10**9)
    tensorboard: bool = _key(False, 'Write event files for TensorBoard too.', free=True)
    log: tuple[str, ...] = _key(
        ('csv',),
        'Where metrics go: csv is always written, the others need their packages.',
        choices=('csv', 'tensorboard', 'wandb', 'mlflow'),
        free=True,
    )

    # faults; docs/reliability.md
    recovery_interval: int = _key(
        0, 'Updates between checkpoints within an epoch; 0: none.', low=0, high=10**9, free=True
    )
    checkpoint_minutes: float = _key(
        30.0, 'Minutes between checkpoints within an epoch; 0: none.', low=0, high=1e6, free=True
    )
    checkpoint_hist: int = _key(
        3, 'How many checkpoints are kept: last.pt, last-1.pt, ...', low=1, high=1000, free=True
    )
    checkpoint_patience: int = _key(5, 'Failed writes in a row that a run survives.', low=0, high=1_000_000, free=True)
    max_skipped_steps: int = _key(
        10, 'Non-finite steps in a row at which a run stops.', low=1, high=1_000_000, free=True
    )
    max_bad_images: int = _key(100, 'Unreadable training images that a run survives.', low=0, high=1_000_000, free=True)
    max_pixels: int = _key(89_478_485, "Larger images are not decoded; the limits are PIL's.", low=1, high=178_956_970)
    stall_timeout: float = _key(
        1800.0, 'Seconds in one phase after which a rank is reported as stalled.', low=1, high=604_800, free=True
    )

    def __post_init__(self) -> None:
        if isinstance(self.img_size, tuple) and len(self.img_size) != 2:
            raise InputError(f'img_size {list(self.img_size)} must be one side or [height, width]')
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
            how = f'--set warmup_epochs={self.epochs - 1} or less, or raise epochs'
            raise InputError(f'warmup_epochs {self.warmup_epochs} must be below epochs {self.epochs}: {how}')
        self._check_task()
        check_model_kwargs(self.model_kwargs)

    def _check_task(self) -> None:
        keys = TASK_KEYS[self.task]
        if self.eval_metric.removeprefix('ema_') not in keys.eval_metrics:
            expected = ', '.join(keys.eval_metrics)
            raise InputError(f'task {self.task} has no eval_metric {self.eval_metric}: expected {expected}')
        for item in dataclasses.fields(self):
            if item.name in keys.unused and getattr(self, item.name) != item.default:
                value = getattr(self, item.name)
                raise InputError(f'{item.name} {value} means nothing to task {self.task}: {keys.why}')

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
# titles of the groups above, by the key that each begins with
SECTIONS = {
    'model': 'Model',
    'dataset': 'Data',
    'no_aug': 'Augmentation',
    'crop_pct': 'Evaluation',
    'global_batch': 'Batches',
    'epochs': 'Optimization',
    'device': 'Precision and speed',
    'seed': 'The run',
    'recovery_interval': 'Faults',
}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys on which results depend and in which two resolved configurations differ, as readable lines."""
    lines = []
    for name, item in FIELDS.items():
        there, here = (values.get(name, item.default) for values in (old, new))  # older files lack newer keys
        if not item.metadata['free'] and there != here:
            lines.append(f'{name}: {there} there, {here} here')
    return lines
