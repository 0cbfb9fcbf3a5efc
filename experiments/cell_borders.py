"""Do cells show as blocks in feature maps? Steps between neighbouring patches across the borders of cells and within.

python -m experiments.cell_borders            a minute on one core; writes to a new folder in output/
python -m experiments.cell_borders --quick    the smallest size, few images; writes nothing unless --output says where

The shipped digits model (8 px, 4x4 patches, a bias that has been learned well) sees the 360 held-out digits at 2 and 4
times its resolution. Every way to continue its bias is a matrix of weights between all patches here, the package's own
ways and remedies that it does not have: the cell grid shifted by half a cell in every other block, a small exact window
on top of the cells, and blending, where a query takes the mean of the four nearest cells' weights.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

import nprf_vit  # noqa: F401  registers the models
from benchmarks.report import RESULTS, Report, options, save_figure
from experiments.dense_features import principal_colours
from nprf_vit.data.datasets.digits import LEVELS, Digits
from nprf_vit.layers import expand_table, resize_table

Weights = list[torch.Tensor]  # (heads, N, N) for block 0, 1, … and again from the first
TRAINED = 4  # patches along a side


def digits(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-out images (360, 1, size, size), normalized as in training, and their classes."""
    held_out = Digits('validation')
    images = torch.from_numpy(held_out.levels).float()[:, None] / (LEVELS - 1)
    images = F.interpolate(images, (size, size), mode='bicubic', antialias=True)
    return (images - 0.3) / 0.37, torch.from_numpy(held_out.targets).long()


def load(size: int) -> tuple[nn.Module, torch.Tensor]:
    """The shipped model for images of another size, and the table (heads, 7, 7) that it learned."""
    folder = RESULTS / 'digits'
    config = yaml.safe_load((folder / 'config.yaml').read_text(encoding='utf-8'))
    channels = {'in_chans': config['in_chans'], 'num_classes': config['num_classes']}
    model = timm.create_model(config['model'], img_size=size, **channels, **config['model_kwargs']).eval()
    weights = load_file(folder / 'model.safetensors')
    table = weights['rel_pos_bias.table'].clone()  # before the model resizes it
    model.load_state_dict(weights)
    return model, table


def run(model: nn.Module, images: torch.Tensor, weights: Weights) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Maps (B, C, H, W) after each block, and logits, with dense attention."""
    x, _ = model._embed(images, None)
    maps = []
    for i, block in enumerate(model.blocks):
        q, k, v = block.attn.project(block.norm1(x))
        phi_q, phi_k = block.attn.features(q, k)
        scores = phi_q @ phi_k.transpose(-1, -2) * weights[i % len(weights)]
        z = scores @ v / scores.sum(-1, keepdim=True)  # B, K, N, D
        x = x + block.attn.proj(z.transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.norm2(x))
        maps.append(x.permute(0, 3, 1, 2))
    return maps, model.forward_head(model.norm(x.flatten(1, 2)))


def in_cells(position: torch.Tensor, count: int, blend: bool = False) -> torch.Tensor:
    """Parts (N, cells) that patches have in cells, given positions along a side in cells.

    One whole cell, or bilinear parts of the four nearest.
    """
    part = torch.zeros(len(position), count)
    if blend:
        low = (position - 0.5).clamp(0, count - 1)
        rest = low - low.floor()
        part.scatter_add_(1, low.long()[:, None], 1 - rest[:, None])
        part.scatter_add_(1, (low.long() + 1).clamp(max=count - 1)[:, None], rest[:, None])
    else:
        part.scatter_(1, position.long()[:, None], 1.0)
    return torch.einsum('ya,xb->yxab', part, part).reshape(-1, count**2)


def between_cells(table: torch.Tensor, side: int, blend: bool = False, shift: bool = False) -> torch.Tensor:
    """Weights (heads, N, N); keys are always in one cell. Shifted by half a cell, there is one more along a side."""
    cells = (table.shape[1] + 1) // 2
    position = (torch.arange(side) + 0.5) * cells / side
    if shift:  # the table lacks the largest offsets: its border stands for them
        table, cells, position = F.pad(table[None], (1, 1, 1, 1), mode='replicate')[0], cells + 1, position + 0.5
    dense = expand_table(table, (cells, cells)).exp()
    return in_cells(position, cells, blend) @ dense @ in_cells(position, cells).T


def ways(table: torch.Tensor, side: int) -> dict[str, Weights]:
    """Each way to continue the table."""
    twice = resize_table(table, (2 * TRAINED, 2 * TRAINED))
    own = expand_table(resize_table(table, (side, side)), (side, side)).exp()
    cells = between_cells(table, side)
    y, x = torch.arange(side**2) // side, torch.arange(side**2) % side
    close = ((y[:, None] - y).abs() <= 2) & ((x[:, None] - x).abs() <= 2)
    return {
        'interpolate': [own],
        'cells': [cells],
        'cells, twice as many': [between_cells(twice, side)],
        'cells, shifted by half in every other block': [cells, between_cells(table, side, shift=True)],
        'cells, exact within 2 patches': [torch.where(close, own, cells)],
        'cells, queries blend four': [between_cells(table, side, blend=True)],
        'cells, twice as many, queries blend four': [between_cells(twice, side, blend=True)],
    }


def largest_border_energy(maps: torch.Tensor) -> float:
    """At the borders of the trained cells, or of twice as many, where shifted and finer cells have theirs."""
    return max(border_energy(maps, cells) for cells in (TRAINED, 2 * TRAINED) if cells < maps.shape[-1])


def border_energy(maps: torch.Tensor, cells: int = TRAINED) -> float:
    """Mean square of steps across the borders of cells, in units of that within cells: (B, C, H, W)."""
    found = [side_energy(maps, dim, cells) for dim in (-2, -1)]
    at, within = (sum(values) for values in zip(*found))
    return at / within


def side_energy(maps: torch.Tensor, dim: int, cells: int) -> tuple[float, float]:
    """Along height or width: mean squares of the steps across borders, and of those within cells."""
    cell = (torch.arange(maps.shape[dim]) * cells) // maps.shape[dim]
    across = cell[1:] != cell[:-1]
    steps = maps.diff(dim=dim).square().sum(1).mean((0, -1 if dim == -2 else 1))
    return steps[across].mean().item(), steps[~across].mean().item()


@torch.inference_mode()
def measure(multiple: int, images: int) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """A row per way, and the last map of the first image."""
    size = 8 * multiple
    (model, table), (x, target) = load(size), digits(size)
    x, target = x[:: len(x) // images][:images], target[:: len(target) // images][:images]
    rows, pictures, own = [], {}, None
    for name, weights in ways(table, TRAINED * multiple).items():
        parts = [run(model, some, weights) for some in x.split(60)]
        maps = torch.cat([last for (*_, last), _ in parts])
        own = maps if own is None else own
        right = torch.cat([logits for _, logits in parts]).argmax(1) == target
        row = {'pixels': size, 'way': name, 'border_energy': round(largest_border_energy(maps), 2)}
        row['from_interpolate'] = round(((maps - own).square().mean() / own.var()).sqrt().item(), 3)
        rows.append(row | {'top1': round(100 * right.double().mean().item(), 1)})
        pictures[name] = maps[0]
    return rows, pictures


def plot(pictures: dict[str, torch.Tensor], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    height, width = next(iter(pictures.values())).shape[-2:]
    figure, axes = plt.subplots(1, len(pictures), figsize=(2.6 * len(pictures), 2.6 * height / width + 0.7))
    for axis, (name, colours) in zip(axes, zip(pictures, principal_colours(list(pictures.values())))):
        axis.imshow(colours, interpolation='nearest')
        axis.set_title(name.replace(', ', ',\n'), fontsize=8, wrap=True)
        axis.axis('off')
    figure.tight_layout()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = options(__doc__).parse_args(argv)
    report = Report.of(args, 'cell_borders')
    rows, pictures = [], {}
    for multiple in (2,) if args.quick else (2, 4):
        more, pictures = measure(multiple, 20 if args.quick else 360)
        rows += more
    report.table(rows)
    report.save({'cell_borders': rows}, {'cell_borders': lambda path: plot(pictures, path)})


if __name__ == '__main__':
    main()
