"""Everything a training or an evaluation consists of, put together from a configuration."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.data.dataset import IterableImageDataset
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import Dataset, Subset

from nprf_vit.config.schema import Config
from nprf_vit.data.batch import Batch
from nprf_vit.data.batch_plan import BatchPlan, plan_batches
from nprf_vit.data.datasets.folder import check_same_classes
from nprf_vit.data.datasets.images import ImageSource
from nprf_vit.data.datasets.real_labels import RealLabels
from nprf_vit.data.datasets.registry import Location, find_dataset, published_count
from nprf_vit.data.fixed_length_epochs import FixedLengthBatches
from nprf_vit.data.sample_order import SampleOrder, TrainBatches
from nprf_vit.engine.distributed.ddp import wrap_model
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.distributed.watchdog import Phase
from nprf_vit.engine.tasks.base import Task
from nprf_vit.engine.tasks.registry import build_task, task_of

from ..data.loaders import StreamLoader, eval_loader, train_loader
from ..data.samples import TrainSamples, Transform
from ..errors import InputError
from .ema import build_ema
from .lr_schedule import LRSchedule, build_schedule
from .model import build_model, load_exact
from .optimizer import Autocast, build_autocast, build_optimizer, build_scaler
from .transfer import BatchTransfer
from .warm_up import unused_parameters, warm_up

# Images go there as bytes. A CPU's workers normalize side by side; other devices may divide with another rounding.
NORMALIZING_DEVICES: tuple[str, ...] = ('cuda',)


@dataclass
class Evaluation:
    """A validation set and how to measure on it."""

    batches: Iterable[Batch]
    task: Task
    num_images: int | None
    autocast: Autocast


@dataclass
class TrainData:
    """The training set of this rank, an epoch at a time."""

    steps_per_epoch: int
    loader: Any
    batches: TrainBatches | None  # None for a stream

    @property
    def is_stream(self) -> bool:
        return self.batches is None

    @property
    def images(self) -> int | None:
        """How many the training set has; None for a stream."""
        return None if self.batches is None else self.batches.order.num_samples

    def indices(self, step: int) -> list[int] | None:
        """The images of global batch number `step`, in slot order; None for a stream."""
        return None if self.batches is None else self.batches.indices(step)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Micro-batches of an epoch from a step on; a stream can only be entered at its beginning."""
        if self.batches is None:
            assert first_step == 0, 'a stream resumes at epoch boundaries only'
            self.loader.start(epoch)
            return self.loader.full_batches()
        self.batches.start(epoch, first_step)
        return iter(self.loader)


@dataclass
class Training:
    """The parts of a training run. `model` is bare; `wrapped` is what the loss goes through (compile, DDP)."""

    config: Config
    place: Place
    plan: BatchPlan
    data: TrainData
    model: nn.Module
    wrapped: nn.Module
    ema: ModelEmaV3 | None
    task: Task
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    scaler: torch.amp.GradScaler
    autocast: Autocast
    transfer: BatchTransfer
    evaluation: Evaluation | None = field(default=None)

    @property
    def total_steps(self) -> int:
        return self.data.steps_per_epoch * self.config.epochs

    @property
    def gates_on_device(self) -> bool:
        """Whether the optimizer leaves out an update by a number on the device, so that the host need not know it."""
        fused = all(group.get('fused') for group in self.optimizer.param_groups)
        return fused and not self.scaler.is_enabled()

    def warm_up(self) -> None:
        """Before the first step of a process, where there are several."""
        if self.place.world > 1:
            self.place.heartbeat.enter(Phase.STARTING)
            warm_up(self.config, self.model, self.wrapped, self.task, self.autocast, self.plan.micro)

    def evaluated_models(self) -> dict[str, nn.Module]:
        return {'': self.model} if self.ema is None else {'': self.model, 'ema_': self.ema.module}


def build_training(
    config: Config,
    place: Place,
    synthetic: bool = False,
    weights: dict[str, torch.Tensor] | None = None,
    origin: str = '',
) -> Training:
    """All parts of a run.

    Args:
        synthetic: noise instead of the data set, which then need not exist.
        weights: of the checkpoint `origin` to continue from, instead of the initial ones. Loaded before anything is
            built around the model: an extended bias takes the size of its window from them.
    """
    plan = plan_batches(config.global_batch, place.world, config.batch_size, config.mixup_block if config.mixes else 1)
    model = build_model(config, fresh=weights is None)
    if weights is not None:
        load_exact(model, weights, origin)
    task = build_task(config, model)
    evaluation = None
    if synthetic:
        data = _indexed_data(config, place, plan, task.synthetic_samples(config, model), _dry_size(config))
    else:
        data, evaluation = _real_data(config, place, plan, model, task)
    model.to(place.device)
    ema = build_ema(config, model)
    autocast = build_autocast(config, place.device)
    has_unused = place.world > 1 and bool(unused_parameters(config, model, task, autocast))
    optimizer = build_optimizer(config, model)
    return Training(
        config=config,
        place=place,
        plan=plan,
        data=data,
        model=model,
        wrapped=wrap_model(config, model, place, has_unused),
        ema=ema,
        task=task,
        optimizer=optimizer,
        schedule=build_schedule(config, optimizer, data.steps_per_epoch),
        scaler=build_scaler(config, place.device),
        autocast=autocast,
        transfer=BatchTransfer(place.device, task.prepare),
        evaluation=evaluation,
    )


def build_evaluation(config: Config, place: Place, model: nn.Module, source: Any = None) -> Evaluation:
    """The validation split, each rank its share; the model tells input size and normalization."""
    build_task(config, model)  # a model of another task is told before its data is read
    source = source or task_of(config).open_images(config, 'validation')
    transform = task_of(config).build_transform(config, model, source, training=False)
    if config.val_limit:
        source = _thin(source, config, config.val_limit)
    is_stream = isinstance(source, IterableImageDataset)
    if config.real_labels and is_stream:
        raise InputError('real_labels need file names, which a stream does not have: use an image folder')
    real = RealLabels(source, config.real_labels) if config.real_labels else None
    task, autocast = build_task(config, model, real), build_autocast(config, place.device)
    transform = _for_workers(transform, task, place)
    if is_stream:
        return Evaluation(StreamLoader(source, transform, config, config.eval_batch, place.rank), task, None, autocast)
    return Evaluation(eval_loader(source, transform, config, place.rank, place.world), task, len(source), autocast)


def _for_workers(transform: Transform, task: Task, place: Place) -> Transform:
    """What of a transform the loader's workers do."""
    return task.defer_to_device(transform) if place.device.type in NORMALIZING_DEVICES else transform


def _thin(source: Any, config: Config, limit: int) -> Subset:
    """Images at even distances, since folders are sorted by class."""
    if isinstance(source, IterableImageDataset) or config.real_labels:
        raise InputError('val_limit needs images by index and no real_labels')
    count = min(limit, len(source))
    return Subset(source, [i * len(source) // count for i in range(count)])


def _real_data(
    config: Config, place: Place, plan: BatchPlan, model: nn.Module, task: Task
) -> tuple[TrainData, Evaluation]:
    source, val = task.open_images(config, 'train'), task.open_images(config, 'validation')
    transform = _for_workers(task.build_transform(config, model, source, training=True), task, place)
    evaluation = build_evaluation(config, place, model, val)
    if isinstance(source, IterableImageDataset):
        return _stream_data(config, place, plan, source, transform), evaluation
    if not config.dataset and isinstance(val, ImageSource):
        check_same_classes(source.dataset, val.dataset)
    num_classes = config.num_classes or model.num_classes
    if source.num_classes is not None and source.num_classes != num_classes:
        raise InputError(f'{source.name} has {source.num_classes} classes, the model {num_classes}: set num_classes')
    samples = TrainSamples(source, transform, config.seed)
    return _indexed_data(config, place, plan, samples, len(source)), evaluation


def _indexed_data(config: Config, place: Place, plan: BatchPlan, samples: Dataset, size: int) -> TrainData:
    block = config.mixup_block if config.mixes else 1
    order = SampleOrder(size, config.global_batch, config.seed, config.aug_repeats, block)
    if config.epoch_steps:
        batches: TrainBatches = FixedLengthBatches(order, plan, place.rank, config.epoch_steps)
    else:
        batches = TrainBatches(order, plan, place.rank)
    steps = config.epoch_steps or order.steps_per_epoch
    return TrainData(steps, train_loader(samples, batches, config), batches)


def _stream_data(
    config: Config, place: Place, plan: BatchPlan, source: IterableImageDataset, transform: Transform
) -> TrainData:
    if config.aug_repeats > 1:
        raise InputError('repeated augmentation needs access by index, which a stream does not have: aug_repeats: 1')
    if config.epoch_steps:
        raise InputError('epoch_steps needs access by index, which a stream does not have')
    loader = StreamLoader(source, transform, config, plan.micro, place.rank)
    total = config.train_images or len(source) * place.world
    if total < config.global_batch:
        raise InputError(f'the stream {config.dataset} does not tell its size ({total}): set train_images')
    return TrainData(total // config.global_batch, loader, None)


def _dry_size(config: Config) -> int:
    known = config.train_images or published_count(config.dataset, 'train')
    if known:
        return known
    entry = find_dataset(config.dataset)
    if config.data_dir or (entry is not None and entry.location is Location.BUNDLED):
        return len(task_of(config).open_images(config, 'train'))
    raise InputError('a dry run needs the size of the training set: give --data-dir, or the key train_images')
