"""Datasets that timm reads by name: those of torchvision, Hugging Face, TensorFlow and WebDataset."""

from pathlib import Path
from typing import Any

from timm.data import create_dataset

from nprf_vit.config.schema import Config
from nprf_vit.errors import InputError


def open_by_name(config: Config, split_name: str, mode: str, training: bool, own_cache: bool) -> Any:
    """A dataset by index or, of some libraries, a stream.

    Args:
        own_cache: The library finds its data without a folder.
    """
    name, root = config.dataset, config.data_dir
    try:
        if root and not config.dataset_download and not own_cache and not Path(root).exists():
            raise InputError(f'the data folder {root} does not exist')
        return create_dataset(
            name,
            root=root,
            split=split_name,
            is_training=training,
            download=config.dataset_download,
            seed=config.seed,
            batch_size=config.batch_size,
            **({} if name.startswith('torch/') else {'input_img_mode': mode}),
        )
    except InputError:
        raise
    except (AssertionError, ModuleNotFoundError, RuntimeError, OSError, ValueError) as error:
        text = str(error).replace('download=True', '--set dataset_download=true')
        raise InputError(f'cannot open dataset {name} in {root}: {text}') from error
    except KeyError as error:  # its text is the missing key alone
        raise InputError(f'cannot open dataset {name} in {root}: KeyError: {error}') from error
