"""Do cells show as blocks in the features of a photograph? A map for each way to continue a bias, and steps at borders.

python -m experiments.cell_photograph            seconds on one core; writes to a new folder in output/
python -m experiments.cell_photograph --quick    a smaller picture; writes nothing unless --output says where

The model of docs/results/cifar10_small (32 px, 8x8 patches, a bias that has been learned well) sees a photograph of
scikit-learn's at four and more times its resolution, as trained. `experiments.cell_borders` has the same for digits,
their accuracy, and remedies that the package does not have.
"""

import timm
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from sklearn.datasets import load_sample_images
from torch import nn

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import RESULTS, Report, options
from experiments.cell_borders import border_energy, plot

FOLDER = RESULTS / 'cifar10_small'
SIZE, QUICK_SIZE, CELLS = (128, 192), (64, 96), 8  # height and width in pixels; cells along a side
# name: rel_pos_extend and rel_pos_size
WAYS = {
    'interpolate': ('interpolate', None),
    'cells': ('cells', CELLS),
    'cells, twice as many': ('cells', 2 * CELLS),
    'extend': ('extend', CELLS),
}


def load(size: tuple[int, int], extend: str, cells: int | None) -> nn.Module:
    """The shipped model at another size, its bias continued in one of the ways."""
    config = yaml.safe_load((FOLDER / 'config.yaml').read_text(encoding='utf-8'))
    position = {'rel_pos_extend': extend} | ({'rel_pos_size': cells} if cells else {})
    arguments = {**config['model_kwargs'], **position, 'img_size': size, 'num_classes': config['num_classes']}
    model = timm.create_model(config['model'], **arguments).eval()
    model.load_state_dict(load_file(FOLDER / 'model.safetensors'))
    return model


def photograph(size: tuple[int, int]) -> torch.Tensor:
    """A temple (1, 3, H, W), normalized as in training."""
    config = yaml.safe_load((FOLDER / 'config.yaml').read_text(encoding='utf-8'))
    image = torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)[None] / 255
    image = F.interpolate(image, size, mode='bicubic', antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ('mean', 'std'))
    return (image - mean) / std


@torch.inference_mode()
def measure(size: tuple[int, int]) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """A row and the last block's map (C, H/4, W/4) per way."""
    image = photograph(size)
    rows, maps = [], {}
    for name, way in WAYS.items():
        model = load(size, *way)
        grid = model.patch_embed.grid_size
        last = model.forward_features(image).transpose(1, 2).unflatten(2, grid)  # 1, C, H/4, W/4
        own = maps.setdefault('interpolate', last[0])
        row = {'pixels': '×'.join(map(str, size)), 'way': name}
        row['border_energy'] = round(max(border_energy(last, cells) for cells in (CELLS, 2 * CELLS)), 2)
        row['from_interpolate'] = round(((last[0] - own).square().mean() / own.var()).sqrt().item(), 3)
        rows.append(row)
        maps[name] = last[0]
    return rows, maps


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'cell_photograph')
    rows, maps = measure(QUICK_SIZE if args.quick else SIZE)
    report.table(rows)
    report.save({'cell_photograph': rows}, {'cell_photograph': lambda path: plot(maps, path)})


if __name__ == '__main__':
    main()
