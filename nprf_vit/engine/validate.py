"""Evaluation of a checkpoint, of its moving average, or of a model's published weights."""

import copy
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError
from .atomic import write_text
from .build import build_evaluation
from .checkpoint import FORMAT, check_file, read_checkpoint
from .config import Config
from .distributed import Place
from .evaluate import evaluate
from .model import build_model, load_exact, load_fitted, load_initial, read_weights
from .provenance import provenance
from .report import results_table


def validate(
    config: Config, place: Place, checkpoint: str | None = None, json_file: str | None = None
) -> dict[str, Any]:
    """Measure, print one table, and write JSON if asked; the numbers are those that training reported."""
    if json_file:
        _check_writable(Path(json_file))
    if not checkpoint and not config.pretrained and not config.initial_checkpoint:
        raise InputError(f'no weights for {config.model}: give --checkpoint FILE')
    model = build_model(config, fresh=checkpoint is None).to(place.device)
    models = {'': model} if checkpoint is None else load_models(model, checkpoint, config)
    part = build_evaluation(config, place, model)
    metrics = evaluate(models, part.batches, part.task, place, part.num_images, part.autocast)
    if place.is_main:
        print(results_table(config, metrics))
        if json_file:
            about = {'model': config.model, 'checkpoint': checkpoint, 'dataset': config.dataset or 'image folder'}
            record = {**about, **metrics, 'provenance': provenance(place.world)}
            write_text(Path(json_file), json.dumps(record, indent=2) + '\n')
    return metrics


def _check_writable(json_file: Path) -> None:
    """Before the work rather than after it."""
    if json_file.is_dir() or not json_file.parent.is_dir():
        raise InputError(f'--json {json_file}: expected a file in a folder that exists')


def load_models(model: nn.Module, checkpoint: str, config: Config) -> dict[str, nn.Module]:
    """The model and, if the checkpoint has one, its moving average, by the prefix of their metrics' names."""
    check_file(checkpoint)
    if Path(checkpoint).suffix == '.safetensors':
        load_exact(model, read_weights(checkpoint), checkpoint)
        return {'': model}
    content = _ours(checkpoint)
    if content is None:  # DeiT's, timm's: tokens and tables may need fitting
        load_initial(model, checkpoint, new_head=False)
        return {'': model}
    # at another resolution than that of the training the position tables are fitted, and the model says so
    load = load_exact if content['config'].get('img_size') == config.to_dict()['img_size'] else load_fitted
    load(model, content['state_dict'], checkpoint)
    if content['state_dict_ema'] is None:
        return {'': model}
    ema = copy.deepcopy(model)
    load(ema, content['state_dict_ema'], checkpoint)
    return {'': model, 'ema_': ema}


def _ours(checkpoint: str) -> dict[str, Any] | None:
    content = read_checkpoint(checkpoint, any_format=True)
    return content if content.get('format') == FORMAT and 'state_dict_ema' in content else None
