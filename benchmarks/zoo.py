"""The zoo table: parameters and multiply-adds of every entry point, at 224 px and at its own size, as markdown.

python -m benchmarks.zoo            on the meta device, so it takes seconds; writes to a new folder in output/
python -m benchmarks.zoo --quick    the tiny models only; writes nothing unless --output says where
"""

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import Report, options


def count_flops(model: torch.nn.Module, image: torch.Tensor) -> tuple[int, int]:
    """Of one forward pass: all, and those of the attention op; on the meta device nothing is computed."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(image)
    counts = counter.get_flop_counts()['Global']
    return counter.get_total_flops(), sum(n for op, n in counts.items() if 'attend' in str(op))


def count(name: str, pixels: int = 224) -> tuple[float, float]:
    """Millions of parameters and billions of multiply-adds per image."""
    with torch.device('meta'):
        model = timm.create_model(name, img_size=pixels).eval()
        flops, _ = count_flops(model, torch.empty(1, 3, pixels, pixels))
    return sum(p.numel() for p in model.parameters()) / 1e6, flops / 2e9


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'zoo')
    names = [*timm.list_models(module='nprf_deit'), 'deit_base_patch16_224']
    rows = []
    for name in tqdm([n for n in names if 'tiny' in n] if args.quick else names):
        pixels = timm.get_pretrained_cfg(name, allow_unregistered=False).input_size[-1]
        (parameters, own), (_, gmacs) = count(name, pixels), count(name)
        row = {'entry point': name, 'parameters, M': f'{parameters:.2f}', 'GMACs at 224 px': f'{gmacs:.2f}'}
        rows.append({**row, 'own size, px': pixels, 'GMACs at its own size': f'{own:.2f}'})
    report.table(rows)
    report.save({'zoo': rows})


if __name__ == '__main__':
    main()
