"""Evaluation of a checkpoint, of its moving average, or of a model's published weights."""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.engine.checkpoint.file import FORMAT, check_file, read_checkpoint
from nprf_vit.engine.distributed.process_group import Place
from nprf_vit.engine.output.eval_progress import show_progress
from nprf_vit.engine.output.provenance import provenance
from nprf_vit.engine.output.result_file import ResultFile

from ..errors import InputError, NotSaved
from ..terminal import boxed
from .build import build_evaluation
from .eval_loop import evaluate
from .model import build_model, load_exact, load_fitted, load_initial, read_weights


def validate(
    config: Config, place: Place, checkpoint: str | None = None, json_file: str | None = None
) -> dict[str, Any]:
    """Measure, print one table, and write JSON if asked; the numbers are those that training reported."""
    results: list[ResultFile] = []
    if json_file:
        place.from_main(lambda: results.append(ResultFile(json_file, '--json')))
    if not checkpoint and not config.pretrained and not config.initial_checkpoint:
        raise InputError(f'no weights for {config.model}: give --checkpoint FILE')
    model = build_model(config, fresh=checkpoint is None, checkpoint=checkpoint).to(place.device)
    models = {'': model} if checkpoint is None else load_models(model, checkpoint, config)
    part = build_evaluation(config, place, model)
    batches = show_progress(part.batches, place, part.num_images)
    metrics = evaluate(models, batches, part.task, place, part.num_images, part.autocast)
    if place.is_main:
        about = {'model': config.model, 'checkpoint': checkpoint, 'dataset': config.dataset or 'image folder'}
        record = {**about, **metrics, 'provenance': provenance(place.world)}
        _deliver(part.task.results_table(config, metrics), json.dumps(record, indent=2) + '\n', results)
    return metrics


def _deliver(table: str, record: str, results: list[ResultFile]) -> None:
    """Write the file, then print: output may get lost. If one of them fails, the other is still done."""
    outlets: dict[str, Callable[[], None]] = {str(result.path): partial(result.write, record) for result in results}
    outlets['standard output'] = partial(print, boxed(table, sys.stdout), flush=True)
    problems = {}
    for name, put in outlets.items():
        try:
            put()
        except OSError as error:
            problems[name] = f'cannot write the results to {name}: {error}'
    if problems:
        places = [f'they are in {name}' for name in outlets if name not in problems]
        raise NotSaved('; '.join([*problems.values(), *(places or ['they are lost'])]))


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
    ours = type(content.get('format')) is int and content['format'] == FORMAT and 'state_dict_ema' in content
    return content if ours else None
