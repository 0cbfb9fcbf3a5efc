"""More content instead of more pixels: canvases of k×k pictures at the scale of the training, a class for every patch.

Trained on canvases of 1×1 or 2×2 pieces of clothing (Fashion-MNIST, reduced to 16 px, 4×4 patches each), evaluated on
canvases of 1×1 to 4×4 as trained: the bias continued in three ways, one of them with three windows, and windows of the
trained size that slide by one picture, whose probabilities are averaged.

python -m experiments.canvases --data-dir DIR    Fashion-MNIST; writes to a new folder in output/
python -m experiments.canvases --quick           tiny models on the embedded digits, or on DIR
"""

# B batch, N patches, k×k pictures of a canvas, s×s pixels of a picture
import sys
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision.datasets import FashionMNIST

from benchmarks.report import save_figure
from experiments.command import main
from experiments.runs import CIFAR, ROOT, Runner, Table, passed, quiet, with_spread
from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.optimizer import build_autocast, build_optimizer
from nprf_vit.errors import InputError

SEEDS, CANVASES = {2: 3, 1: 1}, (1, 2, 3, 4)  # by the trained size
EPOCHS, PICTURES = 20, 512  # pictures of a batch
SIDE, PATCH = 16, 4  # the patch is the file's
# name: rel_pos_extend, and the size of the window in quarters of the trained grid: the largest offsets, which few pairs
# of patches have, are hardly trained
WAYS = {
    'extend': ('extend', None),
    'extend, window of three quarters': ('extend', 3),
    'extend, window of a half': ('extend', 2),
    'interpolate': ('interpolate', None),
    'cells': ('cells', None),
    'sliding windows': ('interpolate', None),
}
SLIDING = 'sliding windows'
TINY = {'embed_dim': 16, 'depth': 1, 'num_heads': 2}


class Labeller(nn.Module):
    """Canvases (B, 1, H, W) of any size to logits (B, H/4, W/4, 10)."""

    def __init__(self, trained: int, side: int, extend: str, options: dict) -> None:
        super().__init__()
        size = {'img_size': trained * side, 'dynamic_img_size': True, 'in_chans': 1, 'num_classes': 0}
        self.encoder = timm.create_model('nprf_deit_tiny', rel_pos_extend=extend, **size, **options)
        self.head = nn.Linear(self.encoder.embed_dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.forward_features(x)).unflatten(1, [s // PATCH for s in x.shape[2:]])


def canvases(pictures: torch.Tensor, labels: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (n, s, s) laid out in k×k, (n/k², 1, k·s, k·s), and a label (n/k², k·s/4, k·s/4) for every patch."""
    n, side = len(pictures) // k**2 * k**2, pictures.shape[-1]
    images = pictures[:n].reshape(-1, k, k, side, side).transpose(2, 3).reshape(-1, 1, k * side, k * side)
    each = side // PATCH
    return images, labels[:n].reshape(-1, k, k).repeat_interleave(each, 1).repeat_interleave(each, 2)


def load(data_dir: str | None, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (n, s, s) around zero and classes: of Fashion-MNIST at 16 px, or scikit-learn's digits."""
    if data_dir is None:
        digits = load_digits()
        some = slice(0, 1000) if part == 'train' else slice(1000, None)
        return torch.tensor(digits.images[some], dtype=torch.float32) / 8 - 1, torch.tensor(digits.target[some])
    try:
        data = FashionMNIST(data_dir, train=part == 'train')
    except RuntimeError as error:
        raise InputError(f'{data_dir} has no FashionMNIST/raw: {error}') from error
    small = F.interpolate(data.data[:, None] / 255, (SIDE, SIDE), mode='bilinear', antialias=True)
    return (small[:, 0] - 0.286) / 0.353, data.targets


def learn(trained: int, seed: int, data_dir: str | None, quick: bool, deadline: float | None) -> Labeller | None:
    """A model that labels canvases of the trained size; None if time was up before."""
    torch.manual_seed(seed)
    pictures, labels = load(data_dir, 'train')
    # attention in plain operators is compiled into the rest: a third faster
    model = Labeller(trained, pictures.shape[-1], 'interpolate', options(quick, seed, exportable=True))
    compiled = model if quick else torch.compile(model)
    config = load_config(ROOT / CIFAR, ['rel_pos_lr_scale=30'])
    optimizer, autocast = build_optimizer(config, model), build_autocast(config, torch.device('cpu'))
    per_epoch = len(pictures) // PICTURES
    per_epoch = min(3, per_epoch) if quick else per_epoch
    steps = (1 if quick else EPOCHS) * per_epoch
    schedule = CosineLRScheduler(
        optimizer, steps, lr_min=1e-5, warmup_t=per_epoch, warmup_lr_init=1e-5, t_in_epochs=False
    )
    for step in range(steps):
        if passed(deadline):
            return None
        if step % per_epoch == 0:
            order = torch.randperm(len(pictures))
        schedule.step_update(step)
        some = order[step % per_epoch * PICTURES :][:PICTURES]
        flipped = torch.where(torch.rand(len(some), 1, 1) < 0.5, pictures[some], pictures[some].flip(-1))
        images, targets = canvases(flipped, labels[some], trained)
        with autocast():
            logits = compiled(images)
        loss = F.cross_entropy(logits.float().flatten(0, 2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % per_epoch == per_epoch - 1:
            print(f'epoch {step // per_epoch + 1}: loss {loss.item():.4f}', flush=True)
    return model


def options(quick: bool, seed: int, exportable: bool = False) -> dict:
    """The model of configs/cifar10_small.yaml."""
    return {**load_config(ROOT / CIFAR).model_kwargs, **(TINY if quick else {}), 'seed': seed, 'exportable': exportable}


@torch.inference_mode()
def accuracy(predict, pictures: torch.Tensor, labels: torch.Tensor, k: int) -> float:
    """Percent of patches whose label is right, on canvases of k×k."""
    images, targets = canvases(pictures, labels, k)
    right = sum((predict(x).argmax(-1) == y).sum().item() for x, y in zip(images.split(50), targets.split(50)))
    return 100 * right / targets.numel()


def sliding(images: torch.Tensor, model: Labeller, trained: int, side: int) -> torch.Tensor:
    """The mean of the probabilities of all windows of the trained size, one picture apart, that see a patch."""
    window, step = trained * side // PATCH, side // PATCH
    height, width = (s // PATCH for s in images.shape[2:])
    total, count = images.new_zeros(len(images), height, width, 10), images.new_zeros(height, width, 1)
    for top in range(0, height - window + 1, step):
        for left in range(0, width - window + 1, step):
            y, x = slice(top, top + window), slice(left, left + window)
            seen = images[:, :, PATCH * top :, PATCH * left :][:, :, : PATCH * window, : PATCH * window]
            total[:, y, x] += model(seen).softmax(-1)
            count[y, x] += 1
    return total / count


def measure(trained: int, seed: int, data_dir: str | None, quick: bool, folder: Path, deadline: float | None):
    """Rows of one trained model: every way on every canvas that it can take; None if time was up before."""
    if passed(deadline):
        return None
    with quiet(folder):
        pictures, labels = load(data_dir, 'test')
        side = pictures.shape[-1]
        weights = folder / 'weights.pt'
        if not weights.is_file():
            model = learn(trained, seed, data_dir, quick, deadline)
            if model is None:
                return None
            torch.save(model.state_dict(), weights)
        rows = []
        for way, (extend, quarters) in WAYS.items():
            size = {'rel_pos_size': trained * side // PATCH * quarters // 4} if quarters else {}
            twin = Labeller(trained, side, extend, {**options(quick, seed), **size}).eval()
            twin.load_state_dict(torch.load(weights))
            for k in CANVASES:
                if k < trained and way == SLIDING:
                    continue  # no window fits
                predict = partial(sliding, model=twin, trained=trained, side=side) if way == SLIDING else twin
                top1 = accuracy(predict, pictures, labels, k)
                rows.append({'trained': trained, 'seed': seed, 'way': way, 'canvas': k, 'patches': f'{top1:.6g}'})
    return rows


def experiment(runner: Runner) -> None:
    if not (runner.data_dir or runner.quick):
        raise InputError('expected --data-dir DIR with FashionMNIST/raw in it')
    pairs = [(t, s) for t, seeds in SEEDS.items() for s in range(1 if runner.quick else seeds)]
    with runner.table('canvases', ('trained', 'seed'), report, plot) as table:
        items = [
            (t, s, runner.data_dir, runner.quick, runner.work / f'canvases_{t}-{s}')
            for t, s in pairs
            if not table.has(trained=t, seed=s)
        ]
        for _, rows in runner.each(measure, items):
            table.add(*rows)


def report(table: Table) -> list[dict]:
    """Percent of patches with the right label."""
    rows = []
    for trained in sorted(SEEDS):
        for way in WAYS:
            found = {k: table.values('patches', trained=trained, way=way, canvas=k) for k in CANVASES}
            if any(found.values()):
                cells = {f'{k}×{k}': with_spread(v, 1) if v else '' for k, v in found.items()}
                rows.append({'trained on': f'{trained}×{trained}', 'way': way, **cells})
    return rows


def plot(table: Table, path: Path) -> None:
    """A panel for each trained size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout='constrained')
    for trained, axes in zip(sorted(SEEDS), figure.subplots(1, 2, sharey=True)):
        for i, way in enumerate(WAYS):
            found = {k: table.values('patches', trained=trained, way=way, canvas=k) for k in CANVASES}
            seen = {k: sum(v) / len(v) for k, v in found.items() if v}
            axes.plot(list(seen), list(seen.values()), 'o<>s^D'[i] + '-', label=way)
        axes.set(xlabel='pictures along a side of the canvas', title=f'trained on {trained}×{trained}')
        axes.set_xticks(CANVASES)
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel='patches with the right label, %')
    figure.axes[0].legend(fontsize=8)
    save_figure(figure, path, 150)


if __name__ == '__main__':
    sys.exit(main('canvases', __doc__, experiment))
