"""DataLoaders over the fixed order. timm's loaders fit neither: they erase on the device and pad evaluation."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from timm.data.dataset import IterableImageDataset
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nprf_vit.config.schema import Config
from nprf_vit.data.datasets.images import ImageSource

from ..errors import BadImage, InputError, first_line
from .batch import Batch, collate, collate_pairs
from .byte_images import ByteImage
from .sample_order import EvalBatches, TrainBatches
from .samples import ATTEMPTS, EvalSamples, Transform
from .seeding import derive_seed, seeded
from .workers import SafeLoader, batches_of_workers, setup_worker


def _common(config: Config) -> dict[str, Any]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    pin = config.pin_mem and config.device != 'cpu' and device is not None and device.type != 'mps'
    return {'num_workers': config.workers, 'pin_memory': pin, 'worker_init_fn': setup_worker}


def train_loader(samples: Dataset, batches: TrainBatches, config: Config) -> SafeLoader:
    return SafeLoader(
        samples,
        batch_sampler=batches,
        collate_fn=collate,
        persistent_workers=config.workers > 0,
        generator=torch.Generator().manual_seed(config.seed),  # or the loader would draw from the global one
        **_common(config),
    )


def eval_loader(source: ImageSource, transform: Transform, config: Config, rank: int, world: int) -> SafeLoader:
    batches = EvalBatches(len(source), config.eval_batch, rank, world)
    generator = torch.Generator().manual_seed(config.seed)
    return SafeLoader(
        EvalSamples(source, transform),
        batch_sampler=batches,
        collate_fn=collate,
        generator=generator,
        **_common(config),
    )


class _StreamTransform:
    """A transform for streams, which have no index: seeded by the count of images that this worker has seen.

    One that raises is tried again with other random numbers: a stream has no place for a stand-in and its note.
    """

    def __init__(self, transform: Transform, seed: int, rank: int) -> None:
        self.transform, self.seed, self.rank = transform, seed, rank
        self.epoch, self.count = 0, 0

    def start(self, epoch: int) -> None:
        self.epoch, self.count = epoch, 0

    def __call__(self, image: Any) -> torch.Tensor | ByteImage:
        worker = get_worker_info()
        parts = self.epoch, self.rank, worker.id if worker else 0, self.count
        self.count += 1
        for attempt in range(ATTEMPTS):
            with seeded(derive_seed(self.seed, 'stream', *parts, *([attempt] if attempt else []))):
                try:
                    return self.transform(image)
                except Exception as error:
                    problem = f'image {self.count} of a stream: {type(error).__name__}: {first_line(error)}'
                    warnings.warn(f'cannot augment {problem}; tried again with other random numbers', stacklevel=1)
        raise BadImage(f'cannot augment {problem}, and {ATTEMPTS} times so')


class StreamLoader:
    """Batches from a reader without index access (wds, tfds, hfids): order and sharding are the reader's.

    An epoch's order comes from (seed, epoch) through the reader and can be entered at its beginning only. It depends
    on the world size and on the number of workers, unlike that of an indexed dataset.

    Readers carry the state of their shuffling from epoch to epoch, which a continuation would lack. Workers that live
    for one epoch begin anew, so there is always one.
    """

    def __init__(
        self, dataset: IterableImageDataset, transform: Transform, config: Config, batch: int, rank: int = 0
    ) -> None:
        dataset.transform = _StreamTransform(transform, config.seed, rank)
        options = _common(config)
        options['num_workers'] = max(1, config.workers)
        dataset.set_loader_cfg(num_workers=options['num_workers'])
        self.dataset, self.seed, self.rank = dataset, config.seed, rank
        self.generator = torch.Generator().manual_seed(config.seed)  # of the workers' seeds
        self.loader = DataLoader(
            dataset, batch_size=batch, collate_fn=collate_pairs, generator=self.generator, **options
        )

    def start(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)
        self.dataset.transform.start(epoch)
        self.generator.manual_seed(derive_seed(self.seed, 'stream order', epoch, self.rank))

    def __iter__(self) -> Iterator[Batch]:
        return batches_of_workers(self.loader.__iter__)

    def full_batches(self) -> Iterator[Batch]:
        """Batches of full size for ever: shards are uneven, and every rank must take the same number of steps."""
        while True:
            found = 0
            for batch in self:
                if len(batch.images) == self.loader.batch_size:
                    found += 1
                    yield batch
            if not found:
                raise InputError(f"a rank's shard holds fewer than {self.loader.batch_size} images, one batch")
