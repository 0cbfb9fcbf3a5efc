"""Train on a folder of images of your own, or fine-tune on it: one folder per class, nothing else.

python examples/own_folder.py FOLDER                       FOLDER/CLASS/IMAGE, any names, any number of classes
python examples/own_folder.py FOLDER --fine-tune NAME      from a model with weights, by timm's name
python examples/own_folder.py FOLDER --fine-tune FILE      from a checkpoint of the configuration's model, or of a DeiT
python examples/own_folder.py FOLDER --set epochs=60       further arguments go to train.py
python examples/own_folder.py FOLDER --demo 40             no images yet: first write 40 of each of sklearn's digits

A fifth of each class is set apart for validation, as links in OUTPUT/data; the images stay where they are.

With --demo 40 --set hflip=0, from scratch, and then with --fine-tune nprf_deit_tiny.fashion_mnist:

    10 classes, 308 images to train and 92 to validate on
    …
                                 top-1   top-5      loss   images
    nprf_deit_tiny               56.52   92.39    1.5057       92
    nprf_deit_tiny (EMA)         40.22   83.70    1.9010       92
    best top1 56.52 after epoch 20; weights in output/own_images/best.pt

and

    10 classes, 308 images to train and 92 to validate on
    …
                                          top-1   top-5      loss   images
    nprf_deit_tiny.fashion_mnist          94.57  100.00    0.4138       92
    nprf_deit_tiny.fashion_mnist (EMA)    83.70  100.00    0.6215       92
    best top1 94.57 after epoch 20; weights in output/tuned/best.pt
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

import timm
from timm.data.readers.img_extensions import get_img_extensions

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.data.datasets.digits import Digits

ROOT = Path(__file__).resolve().parents[1]


def find_images(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, which is the name of a folder in `folder`; sorted."""
    suffixes = set(get_img_extensions())
    if not folder.is_dir():
        raise SystemExit(f'error: {folder} is not a folder')
    if (folder / 'train').is_dir():
        raise SystemExit(
            f'error: {folder} has a folder train, so it is split already: '
            f'python train.py --config configs/own_images.yaml --data-dir {folder} --set num_classes=N'
        )
    classes = {}
    for entry in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith('.')):
        classes[entry.name] = sorted(path for path in entry.rglob('*') if path.suffix.lower() in suffixes)
    few = [name for name, images in classes.items() if len(images) < 2]
    if len(classes) < 2 or few:
        raise SystemExit(
            f'error: {folder} has {len(classes)} classes, {len(few)} of them with fewer than 2 images '
            f'({", ".join(few[:5]) or "none"}): expected {folder}/CLASS/IMAGE'
        )
    return classes


def split(images: list[Path], folder: Path) -> tuple[list[Path], list[Path]]:
    """Four fifths for training, one for validation, chosen by name: an image keeps its side when others are added."""

    def part(path: Path) -> int:
        name = path.relative_to(folder).as_posix()
        return int.from_bytes(hashlib.blake2b(name.encode('utf-8', 'surrogateescape'), digest_size=8).digest(), 'big')

    val = {path for path in images if part(path) % 5 == 0}
    if len(val) in (0, len(images)):  # by chance, in a small class
        val = {min(images, key=part)}
    return [path for path in images if path not in val], [path for path in images if path in val]


def link(images: list[Path], source: Path, target: Path) -> None:
    """Links in one flat folder; images of subfolders keep their path in their name."""
    target.mkdir(parents=True, exist_ok=True)
    for path in images:
        name = target / '_'.join(path.relative_to(source).parts)
        if not name.is_symlink():
            name.symlink_to(path.resolve())


def write_digits(folder: Path, number: int) -> None:
    """`number` scans of each digit as PNG files, into a folder that is not there yet."""
    if folder.exists():
        raise SystemExit(f'error: --demo writes a new folder, and {folder} is there already')
    digits = Digits('train')
    for name in digits.classes:
        (folder / name).mkdir(parents=True)
        chosen = [i for i in range(len(digits)) if digits.targets[i] == int(name)][:number]
        for i in chosen:
            digits[i][0].save(folder / name / f'{i:04d}.png')


def fine_tune_keys(start: str) -> list[str]:
    """Keys of train.py that start from trained weights: a quarter of the learning rate, and no extra for the bias.

    Args:
        start: A file, for the model of the configuration, or the name of a model that timm has weights for.
    """
    slower = ['lr=5e-4', 'rel_pos_lr_scale=1']
    if Path(start).is_file():
        return [f'initial_checkpoint={start}', *slower]
    if not timm.is_model_pretrained(start):
        ours = ', '.join(timm.list_pretrained('*prf_deit*'))
        raise SystemExit(f'error: --fine-tune {start}: neither a file nor a model with weights, such as {ours}')
    cfg = timm.get_pretrained_cfg(start)
    channels, height, width = cfg.input_size
    data = [f'in_chans={channels}', f'img_size=[{height},{width}]', f'mean={list(cfg.mean)}', f'std={list(cfg.std)}']
    return [f'model={start}', 'pretrained=true', 'model_kwargs={}', *data, *slower]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--config', default=str(ROOT / 'configs' / 'own_images.yaml'), metavar='FILE')
    parser.add_argument('--output', type=Path, default=Path('output/own_images'), metavar='DIR')
    parser.add_argument('--fine-tune', metavar='NAME|FILE', help='start from trained weights')
    parser.add_argument('--demo', type=int, metavar='N', help="first write N of each of scikit-learn's digits")
    parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override keys')
    args, rest = parser.parse_known_args(argv)
    keys = fine_tune_keys(args.fine_tune) if args.fine_tune else []
    if args.demo:
        write_digits(args.folder, args.demo)
    classes = find_images(args.folder)
    counts = [0, 0]
    for name, images in classes.items():
        for k, (part, chosen) in enumerate(zip(('train', 'val'), split(images, args.folder))):
            link(chosen, args.folder / name, args.output / 'data' / part / name)
            counts[k] += len(chosen)
    print(f'{len(classes)} classes, {counts[0]} images to train and {counts[1]} to validate on', flush=True)
    command = ['--config', args.config, '--data-dir', str(args.output / 'data'), '--output', str(args.output)]
    command += [*rest, '--set', f'num_classes={len(classes)}', *keys, *args.set]
    return subprocess.run([sys.executable, str(ROOT / 'train.py'), *command]).returncode


if __name__ == '__main__':
    sys.exit(main())
