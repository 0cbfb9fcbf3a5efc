"""Turn a checkpoint of train.py into its twin with another attention kernel, without retraining.

python -m nprf_vit.convert_checkpoint --checkpoint output/NAME/best.pt --output twin.safetensors --feature-dim 64
"""

import argparse
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import dump_config, make_config, override
from nprf_vit.data.transforms import mean_and_std
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.engine.output.atomic_file import write_text

from .engine.model import build_model, load_exact
from .errors import InputError
from .layers import KERNELS
from .models import KernelVisionTransformer
from .models.conversion import convert
from .models.rel_pos_conversion import has_rel_pos_twin, twin_arguments

# arguments of a model that have keys of their own
_KEYS = {
    'img_size': 'img_size',
    'in_chans': 'in_chans',
    'num_classes': 'num_classes',
    'drop_rate': 'drop',
    'drop_path_rate': 'drop_path',
}


def convert_checkpoint(
    checkpoint: str, kernel: str, feature_dim: int, seed: int, use_ema: bool = True
) -> tuple[nn.Module, Config]:
    """The twin of a checkpoint's model, and the configuration that builds it."""
    content = read_checkpoint(checkpoint)
    config = make_config(content['config'], origin=checkpoint)
    model = build_model(config, fresh=False, checkpoint=checkpoint)
    averaged = content.get('state_dict_ema') if use_ema else None
    load_exact(model, content['state_dict'] if averaged is None else averaged, checkpoint)
    try:
        twin = convert(model, kernel, feature_dim, seed)
    except ValueError as error:
        raise InputError(f'{checkpoint}: {error}') from None
    if has_rel_pos_twin(model):
        return twin, _twin_config(_family_config(config, model), kernel, feature_dim, seed)
    if not isinstance(model, KernelVisionTransformer):
        raise InputError(
            f'{checkpoint} is a {config.model}, whose twin no name in the registry builds: use nprf_vit.convert(model) '
            'in Python'
        )
    return twin, _twin_config(config, kernel, feature_dim, seed)


def _family_config(config: Config, model: nn.Module) -> Config:
    """The configuration of a model of this family that a BEiT or vit_relpos model becomes, its images as they were."""
    arguments = twin_arguments(model)
    values = {key: arguments.pop(name) for name, key in _KEYS.items()}
    mean, std = mean_and_std(config, model)
    return override(config, model='nprf_deit_base', model_kwargs=arguments, mean=mean, std=std, **values)


def _twin_config(config: Config, kernel: str, feature_dim: int, seed: int) -> Config:
    changed = {'kernel': kernel, 'feature_dim': feature_dim, 'seed': seed}
    return override(
        config,
        model_kwargs={**config.model_kwargs, **changed},
        initial_checkpoint=None,
        pretrained=False,
        data_dir=None,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m nprf_vit.convert_checkpoint', description=__doc__.splitlines()[0])
    parser.add_argument('--checkpoint', required=True, metavar='FILE', help='last.pt or best.pt of train.py')
    parser.add_argument(
        '--output', required=True, metavar='FILE', help='weights to write (.safetensors), with a .yaml beside them'
    )
    parser.add_argument('--kernel', default='prf', choices=KERNELS, help='kernel of the twin (default prf)')
    parser.add_argument('--feature-dim', type=int, default=32, help='random features per head (default 32)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random features (default 0)')
    parser.add_argument('--no-ema', action='store_true', help='the last weights instead of their moving average')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    output = Path(args.output)
    try:
        if not output.parent.is_dir() or output.suffix != '.safetensors':
            raise InputError(f'--output {output}: expected a .safetensors file in a folder that exists')
        twin, config = convert_checkpoint(args.checkpoint, args.kernel, args.feature_dim, args.seed, not args.no_ema)
    except InputError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    save_file({name: value.contiguous() for name, value in twin.state_dict().items()}, output)
    write_text(output.with_suffix('.yaml'), dump_config(config))
    print(f'wrote {output} and {output.with_suffix(".yaml")}; measure it with')
    print(f'python validate.py --config {output.with_suffix(".yaml")} --checkpoint {output}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
