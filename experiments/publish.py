"""Collect what others need to check the number of a finished run: weights, configuration, history, checksums.

python -m experiments.publish --run output/fashion_mnist --output docs/results/fashion_mnist

The weights of models that the package ships lie in nprf_vit/models/weights; their model.safetensors in docs/results is
a link. For the Hugging Face Hub: python -m nprf_vit.hub.
"""

import argparse
import hashlib
import shutil
from pathlib import Path

from safetensors.torch import save_file

from nprf_vit.config.yaml_file import dump_config, load_config, override
from nprf_vit.engine.checkpoint.file import read_checkpoint

WEIGHTS, SUMS = 'model.safetensors', 'SHA256SUMS'
METRICS = ('top1', 'top5', 'bpd', 'bpd_se', 'loss')  # as far as the task has them


def publish(run: Path, output: Path) -> dict[str, float]:
    """Copy the weights of the last epoch, which no validation image has chosen; returns metrics."""
    last = read_checkpoint(run / 'last.pt')
    metrics = last['history'][-1]
    output.mkdir(parents=True, exist_ok=True)
    note = {'epoch': str(metrics['epoch']), 'weights': 'last step of the epoch'}
    weights = (output / WEIGHTS).resolve()  # where it is a link, the file in the package is the one to replace
    save_file({name: w.contiguous() for name, w in last['state_dict'].items()}, weights, metadata=note)
    config = override(load_config(run / 'config.yaml'), data_dir=None)  # a folder of this machine only
    (output / 'config.yaml').write_text(dump_config(config), encoding='utf-8')
    shutil.copyfile(run / 'summary.csv', output / 'summary.csv')
    (output / SUMS).write_text(''.join(f'{digest(output / name)}  {name}\n' for name in (WEIGHTS, 'config.yaml')))
    return {name: metrics[name] for name in METRICS if name in metrics}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--run', type=Path, required=True, help='output folder of train.py')
    parser.add_argument('--output', type=Path, required=True, help='folder to publish')
    args = parser.parse_args(argv)
    metrics = publish(args.run, args.output)
    print(', '.join(f'{name} {value:.4f}' for name, value in metrics.items()))
    size = (args.output / WEIGHTS).stat().st_size / 1e6
    print(f'{size:.2f} MB; check with')
    print(f'python validate.py --config {args.output}/config.yaml --checkpoint {args.output}/{WEIGHTS} --data-dir DIR')


if __name__ == '__main__':
    main()
