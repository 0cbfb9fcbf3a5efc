"""The folder: model.safetensors and config.json for timm, a model card, and the run's curves, settings and history."""

import copy
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from timm.models import save_for_hf
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import dump_config, override
from nprf_vit.data.transforms import mean_and_std, model_input_size
from nprf_vit.engine.checkpoint.file import LAST, read_checkpoint
from nprf_vit.engine.checkpoint.saver import BEST
from nprf_vit.engine.model import build_model
from nprf_vit.engine.output import curves
from nprf_vit.engine.run_report.read_run import RunRecord
from nprf_vit.engine.tasks.registry import task_of
from nprf_vit.engine.validate import load_models

from ..errors import InputError, NotSaved
from .model_card import CURVES, Measured, model_card

WEIGHTS = 'model.safetensors'


class Weights(NamedTuple):
    """A model with its weights, and what they were measured to do."""

    model: nn.Module
    measured: Measured


def check_folder(folder: Path) -> None:
    """Refuse to mix with other files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f'FOLDER {folder}: expected a new or an empty folder')


def write_folder(
    run: RunRecord,
    folder: Path,
    name: str,
    repo: str | None = None,
    license_id: str = 'apache-2.0',
    checkpoint: str | None = None,
    ema: bool = False,
) -> str:
    """Write a run's weights as timm loads them, with a model card.

    Args:
        name: Of the model, for the card's title.
        repo: USER/NAME on the Hub, if it goes there.
        license_id: The Hub's word for the licence of the weights.
        checkpoint: Whose weights; best.pt unless given.
        ema: The moving average instead.

    Returns:
        One line about the weights and their numbers.
    """
    path = _find_checkpoint(run.folder, checkpoint)
    config = _without_paths(run.config)
    weights = _load(run, path, ema)
    measured = weights.measured
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(weights.model, config, measured, folder, license_id)
        (folder / 'config.yaml').write_text(dump_config(config), encoding='utf-8')
        shutil.copyfile(run.folder / 'summary.csv', folder / 'summary.csv')
        has_curves = _copy_curves(run, folder)
        card = model_card(run, config, weights.model, measured, name, repo, license_id, has_curves)
        (folder / 'README.md').write_text(card, encoding='utf-8')
    except OSError as error:
        raise NotSaved(f'cannot write {folder}: {error.strerror or error}') from None
    return f'{path.name}{" (EMA)" if ema else ""} of epoch {measured.epoch}: {measured}'


def _find_checkpoint(run: Path, given: str | None) -> Path:
    if given is not None:
        return Path(given)
    found = [run / name for name in (BEST, WEIGHTS) if (run / name).is_file()]
    if not found:
        raise InputError(f'{run} has neither {BEST} nor {WEIGHTS}: give --checkpoint FILE')
    return found[0]


def _without_paths(config: Config) -> Config:
    """Folders of this machine mean nothing elsewhere."""
    initial = config.initial_checkpoint and Path(config.initial_checkpoint).name
    return override(config, data_dir=None, initial_checkpoint=initial)


def _load(run: RunRecord, path: Path, ema: bool) -> Weights:
    model = build_model(run.config, fresh=False, checkpoint=str(path))
    models = load_models(model, str(path), run.config)
    if ema and 'ema_' not in models:
        raise InputError(f'{path} has no moving average: the run had model_ema: false')
    row = _metrics(run, path)
    prefix = 'ema_' if ema else ''
    found = {name: row[prefix + name] for name in _metric_names(run) if row.get(prefix + name) is not None}
    measured = Measured(
        found, row.get('images'), int(row['epoch']), path.name == BEST, run.config.eval_metric, 'EMA' if ema else ''
    )
    return Weights(models[prefix].eval(), measured)


def _metric_names(run: RunRecord) -> list[str]:
    """Those of the plain weights, in the order of the table."""
    others = {'epoch', 'step', 'lr', 'train_loss', 'skipped', 'images_per_s', 'data_wait', 'seconds', 'images'}
    return [name for name in run.epochs if name not in others and not name.startswith('ema_')]


def _metrics(run: RunRecord, path: Path) -> dict[str, Any]:
    """What was measured of these weights: a row of summary.csv, as the checkpoint says or by its epoch."""
    columns = run.epochs
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    epoch = None
    if path.suffix == '.safetensors':
        with safe_open(path, 'pt') as file:
            epoch = (file.metadata() or {}).get('epoch')
    else:
        content = read_checkpoint(path, any_format=True)
        history = content.get('history') if path.name.startswith(Path(LAST).stem) else None
        epoch = (content.get('metrics') or (history or [{}])[-1]).get('epoch')
    measured = [row for row in rows if any(row.get(name) is not None for name in _metric_names(run))]
    chosen = [row for row in rows if epoch is not None and row['epoch'] == int(epoch)]
    return (chosen or measured[-1:] or rows[-1:])[0]


def _save(model: nn.Module, config: Config, measured: Measured, folder: Path, license_id: str) -> None:
    """By timm's own function, with the size, the mean and the deviation that the run had."""
    model = copy.copy(model)  # the card still needs the model's own
    classifies = config.task == 'classification'  # other tasks embed bytes as they are, by no convolution
    data = dict(zip(('mean', 'std'), mean_and_std(config, model))) if classifies else {'first_conv': None}
    old = {name: value for name, value in model.pretrained_cfg.items() if name not in ('tag', 'label_names')}
    model.pretrained_cfg = {
        **old,
        'input_size': model_input_size(config, model),
        **data,
        'crop_pct': config.crop_pct,
        'crop_mode': config.crop_mode,
        'interpolation': config.interpolation,
        'num_classes': model.num_classes,
        'license': license_id,
        'description': f'{config.dataset or "image folder"}, epoch {measured.epoch}: {measured}',
    }
    given = {'img_size': config.img_size, 'in_chans': config.in_chans, 'num_classes': model.num_classes}
    args = {**getattr(model, '_model_args', {}), **given, **config.model_kwargs}
    args = {k: v for k, v in args.items() if v is not None and k not in ('drop_rate', 'drop_path_rate')}
    save_for_hf(model, str(folder), model_args=args, safe_serialization=True)


def _copy_curves(run: RunRecord, folder: Path) -> bool:
    if (run.folder / CURVES).is_file():
        shutil.copyfile(run.folder / CURVES, folder / CURVES)
    elif curves.available:
        curves.draw_curves(folder / 'summary.csv', folder / CURVES, *task_of(run.config).curve)
    return (folder / CURVES).is_file()
