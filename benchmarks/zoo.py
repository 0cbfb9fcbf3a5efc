"""The zoo table: parameters and multiply-adds of every entry point, at 224 px and at its own size, as markdown.

python -m benchmarks.zoo            on the meta device, so it takes seconds; writes to a new folder in output/
python -m benchmarks.zoo --quick    the tiny models only; writes nothing unless --output says where
"""

import timm
from tqdm import tqdm

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import Report, options
from nprf_vit.engine.model_cost import count_model, own_size


def count(name: str, pixels: int = 224) -> tuple[float, float]:
    """Millions of parameters and billions of multiply-adds per image."""
    cost = count_model(name, (pixels, pixels), update=False)
    return cost.parameters / 1e6, cost.macs / 1e9


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'zoo')
    names = [*timm.list_models(module='nprf_deit'), 'deit_base_patch16_224']
    rows = []
    for name in tqdm([n for n in names if 'tiny' in n] if args.quick else names):
        pixels = own_size(name)[-1]
        (parameters, own), (_, gmacs) = count(name, pixels), count(name)
        row = {'entry point': name, 'parameters, M': f'{parameters:.2f}', 'GMACs at 224 px': f'{gmacs:.2f}'}
        rows.append({**row, 'own size, px': pixels, 'GMACs at its own size': f'{own:.2f}'})
    report.table(rows)
    report.save({'zoo': rows})


if __name__ == '__main__':
    main()
