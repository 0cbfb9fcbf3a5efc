"""GPU-days that each configuration should take, an estimate from its operations; no GPU is needed to make it.

python -m benchmarks.budget            every table row; seconds; writes to a new folder in output/
python -m benchmarks.budget --quick    one row; writes nothing unless --output says where

On the machine itself `train.py --config FILE --dry-run` measures instead.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import Report, options
from nprf_vit.config.schema import Config
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.model import build_model
from nprf_vit.engine.model_cost import count_flops
from nprf_vit.engine.tasks.registry import task_of

ROOT = Path(__file__).parent.parent
BACKWARD = 3.0  # forward and backward of a matrix product, in units of the forward
# The fused kernels form every score anew in four places of the backward: 4N²(M+D) beside N²(M+D) forward.
FUSED_BACKWARD = 5.0
ATTEND_BACKWARD = {True: 322 / 97, False: 3.5}  # with a bias 1 + (3M+2D+1)/(M+D+1) at M=32, D=64; without 1 + 5/2
# Share of the peak that training keeps up. DeiT's authors report 53 hours on one node of 8 GPUs for DeiT-base: if those
# are V100s, 0.21 by this count.
SUSTAINED = 0.2


@dataclass
class Gpu:
    """Peak rates of matrix products, TFLOP/s, from the maker's data sheet."""

    name: str
    half: float
    single: float  # attention sums in float32, TF32 off
    tf32: float | None = None  # the fused kernels under autocast; the products with v run at the half rate, not counted

    def days(self, half_flops: float, single_flops: float) -> float:
        """With the attention in float32 on cores without tensor units."""
        return self._days(half_flops / self.half + single_flops / self.single)

    def fused_days(self, half_flops: float, attend_flops: float) -> float:
        """With the attention by the fused kernels, all of it at the TF32 rate."""
        return self._days(half_flops / self.half + attend_flops / self.tf32)

    def _days(self, seconds_at_peak: float) -> float:
        return seconds_at_peak / (SUSTAINED * 1e12) / 86400


GPUS = [Gpu('V100', 125.0, 15.7), Gpu('A100', 312.0, 19.5, 156.0), Gpu('H100', 989.0, 67.0, 495.0)]


def images(config: Config) -> int:
    """Images that the whole schedule passes through the model."""
    steps = config.epoch_steps or config.train_images // config.global_batch
    return config.epochs * steps * config.global_batch


def estimate(path: Path) -> dict:
    """One row: operations of one image, of the schedule, and GPU-days."""
    config = load_config(path)
    with torch.device('meta'):
        model = build_model(config, fresh=False).eval()
    image = task_of(config).synthetic_samples(config, model)[0, 0, 0].image[None].to('meta')
    total, attend = count_flops(model, image)
    biased = any('rel_pos_bias' in name for name, _ in model.named_parameters())
    seen = images(config)
    half, single = BACKWARD * (total - attend) * seen, ATTEND_BACKWARD[biased] * attend * seen
    row = {
        'config': str(path.relative_to(ROOT)),
        'images': seen,
        'gflop_per_image': f'{total / 1e9:.1f}',
        'of_it_attention_op': f'{attend / 1e9:.2f}',
        'training_exaflop': f'{(half + single) / 1e18:.1f}',
    }
    row |= {f'{gpu.name}_days': f'{gpu.days(half, single):.1f}' for gpu in GPUS}
    fused = FUSED_BACKWARD * attend * seen
    return row | {f'{gpu.name}_days_fused': f'{gpu.fused_days(half, fused):.1f}' for gpu in GPUS if gpu.tf32}


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'budget')
    paths = sorted(ROOT.glob('configs/imagenet*/*.yaml'))
    rows = [estimate(path) for path in (paths[:1] if args.quick else paths)]
    report.table(rows)
    report.save({'budget': rows})


if __name__ == '__main__':
    main()
