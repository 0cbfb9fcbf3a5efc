"""README.md of a model: what it is, what was measured, how to load it, how it was trained, whose it is."""

from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from nprf_vit.config.schema import FIELDS, Config
from nprf_vit.engine.output.numbers import decimals
from nprf_vit.engine.output.report import model_title
from nprf_vit.engine.run_report.read_run import RunRecord

CURVES = 'curves.png'
# metric of summary.csv: its name in a sentence, the Hub's word for it, decimals
METRICS = {
    'top1': ('top-1, %', 'accuracy', 2),
    'top5': ('top-5, %', 'top-5-accuracy', 2),
    'loss': ('cross-entropy', 'cross-entropy', 4),
    'bpd': ('bits/dim', 'bits-per-dim', 4),
    'bpd_se': ('its standard error', 'standard-error', 4),
}
TASKS = {'classification': 'image-classification', 'pixel': 'unconditional-image-generation'}
CITATION = """@inproceedings{luo2021stable,
  title={Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding},
  author={Luo, Shengjie and Li, Shanda and Cai, Tianle and He, Di and Peng, Dinglan and Zheng, Shuxin and Ke, Guolin and Wang, Liwei and Liu, Tie-Yan},
  booktitle={Advances in Neural Information Processing Systems},
  year={2021}
}"""  # noqa: E501


@dataclass(frozen=True)
class Measured:
    """What the run measured of the weights in the folder.

    Attributes:
        metrics: By their names in summary.csv.
        images: Of the validation set.
        epoch: After which.
        chosen: Whether the epoch is the one that did best on these images.
        metric: By which it was chosen.
        weights: '' or 'EMA'.
    """

    metrics: dict[str, float]
    images: float | None
    epoch: int
    chosen: bool
    metric: str
    weights: str = ''

    def __str__(self) -> str:
        return ', '.join(f'{_title(name)} {_value(name, value)}' for name, value in self.metrics.items()) or 'no metric'


def _title(name: str) -> str:
    return METRICS[name][0].removesuffix(', %') if name in METRICS else name


def _value(name: str, value: float) -> str:
    return decimals(value, digits=METRICS[name][2] if name in METRICS else 4)


def model_card(
    run: RunRecord,
    config: Config,
    model: nn.Module,
    measured: Measured,
    name: str,
    repo: str | None,
    license_id: str,
    has_curves: bool,
) -> str:
    """The whole card.

    Args:
        config: The run's, without paths of the machine it ran on.
        repo: USER/NAME on the Hub, if it goes there.
        has_curves: Whether curves.png lies beside it.
    """
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    parts = [
        f'# {name}',
        f'`{model_title(config)}`: {millions:.2f} M parameters, trained on {_data(config)} with '
        '`nprf_vit`, timm vision transformers with normalized kernelized attention and relative position bias.',
        '## Numbers',
        _numbers(config, measured),
        *([f'![Losses and metrics over epochs]({CURVES})'] if has_curves else []),
        '## Use',
        _usage(repo, config),
        '## Training',
        _training(run, config),
        '## Licence',
        f'The weights: {license_id}. The data have terms of their own.',
        '## Cite',
        f'```\n{CITATION}\n```',
    ]
    return f'---\n{_metadata(config, measured, name, license_id)}\n---\n\n' + '\n\n'.join(parts) + '\n'


def _data(config: Config) -> str:
    return f'`{config.dataset}`' if config.dataset else 'a folder of images'


def _metadata(config: Config, measured: Measured, name: str, license_id: str) -> str:
    """What the Hub reads: tags, licence, results."""
    task = TASKS.get(config.task, 'image-feature-extraction')
    data = config.dataset or 'image folder'
    split: dict[str, Any] = {
        'dataset_type': data,
        'dataset_name': data,
        'dataset_split': config.val_split,
        'task_type': task,
    }
    results = [
        EvalResult(
            **split,
            metric_type=METRICS[metric][1],
            metric_name=_title(metric),
            metric_value=float(_value(metric, value)),
        )
        for metric, value in measured.metrics.items()
        if metric in METRICS
    ]
    card = ModelCardData(
        license=license_id,
        library_name='timm',
        pipeline_tag=task,
        tags=[task, 'timm', 'nprf_vit'],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _numbers(config: Config, measured: Measured) -> str:
    names = list(measured.metrics)
    heads = [METRICS[name][0] if name in METRICS else name for name in names]
    rows = [['weights', *heads, 'images'], ['---'] * (len(names) + 2)]
    values = [_value(name, measured.metrics[name]) for name in names]
    images = 'not on record' if measured.images is None else f'{measured.images:.0f}'
    rows.append([f'epoch {measured.epoch} of {config.epochs}{measured.weights and ", " + measured.weights}'])
    rows[-1] += [*values, images]
    table = '\n'.join(f'| {" | ".join(row)} |' for row in rows)
    how = f'Measured by the training run on `{config.val_split}` of {_data(config)}.'
    if measured.chosen:
        how += f' The epoch was chosen by `{measured.metric}` on the same images.'
    return f'{table}\n\n{how} All epochs: `summary.csv`.'


def _usage(repo: str | None, config: Config) -> str:
    source = f'hf-hub:{repo}' if repo else 'local-dir:FOLDER'
    lines = ['import timm, nprf_vit', '', f"model = timm.create_model('{source}', pretrained=True).eval()"]
    if config.task == 'classification':
        mode = 'L' if config.in_chans == 1 else 'RGB'
        lines += [
            'transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))',
            f"logits = model(transform(image.convert('{mode}'))[None])  # a PIL image",
        ]
    code = '\n'.join(lines)
    where = '' if repo else 'FOLDER is where this file lies. '
    return (
        f'```python\n{code}\n```\n\n{where}`import nprf_vit` registers the architecture with timm; timm alone lacks it.'
    )


def _training(run: RunRecord, config: Config) -> str:
    changed = {k: v for k, v in config.to_dict().items() if v != FIELDS[k].default and not FIELDS[k].metadata['free']}
    text = yaml.safe_dump(_plain(changed), sort_keys=False, default_flow_style=None, width=100).strip()
    last: dict[str, Any] = run.launches[-1] if run.launches else {}
    made = 'not on record'
    if last:
        made = ', '.join(f'{k} {last.get(k)}' for k in ('nprf_vit', 'torch', 'timm', 'python'))
        made += f'; {last.get("world_size")} × {last.get("device")}'
        made += f'; commit {str(last["commit"])[:12]}' if last.get('commit') else ''
    return (
        f'The keys that differ from their defaults; `config.yaml` has all, for `train.py --config config.yaml`:\n\n'
        f'```yaml\n{text}\n```\n\nMade with: {made}.'
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML has."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
