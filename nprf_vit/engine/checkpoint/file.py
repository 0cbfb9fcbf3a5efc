"""Checkpoint files: complete or absent, checked when read, the last few kept.

`last.pt` is the newest, `last-1.pt` the one before it, and so on; `best.pt` holds weights only.
"""

import errno
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError

from nprf_vit.engine.output.atomic_file import replace_file
from nprf_vit.errors import InputError, first_line

from .checksum import checksum
from .inspection import inspect_file
from .schema import find_fault, is_state_dict

FORMAT = 2
_FIRST_FORMAT = 1  # without a checksum; read up to this commit
_LAST_READER = '637e454'
LAST = 'last.pt'
# a damaged file may raise almost any of these, depending on the byte that is wrong
DAMAGE: tuple[type[Exception], ...] = (
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
)
DAMAGE += (AssertionError, MemoryError, OverflowError, pickle.UnpicklingError, struct.error, SafetensorError)
DAMAGE += (zipfile.BadZipFile, zlib.error)
_DAMAGED_OFFSET = (None, errno.EINVAL)  # of an OSError that tells of wrong bytes, such as a seek before the beginning
_WEIGHTS_OF = ('state_dict', 'model')  # where timm and DeiT keep them


class WrongCheckpoint(InputError):
    """A checkpoint that cannot be read or whose content cannot be; `--resume auto` goes on to an older one."""


class InaccessibleCheckpoint(InputError):
    """A file whose bytes cannot be had: nothing is known of its content, so it is neither passed over nor set aside."""


def save_checkpoint(content: dict[str, Any], path: Path, keep: int | None = None) -> None:
    """Write a checkpoint with its checksum.

    Args:
        keep: How many generations stay, this one included; None for a file without generations.
    """
    content = {**content, 'checksum': checksum(content)}

    def write(stream: BinaryIO) -> None:
        try:
            torch.save(content, stream)
        except RuntimeError as error:  # torch's word for a stream that takes no more
            raise OSError(first_line(error)) from error

    replace_file(path, write, before=None if keep is None else lambda: _rotate(path, keep))


def _rotate(path: Path, keep: int) -> None:
    """Rename every generation to the next older name, oldest first: a kill on the way loses none but the oldest."""
    for number, old in reversed(list(_generations(path))):
        if number + 1 < keep:
            os.replace(old, _older(path, number + 1))
        elif number:
            old.unlink()


def _older(path: Path, number: int) -> Path:
    return path.with_name(f'{path.stem}-{number}{path.suffix}') if number else path


def _generations(path: Path) -> Iterator[tuple[int, Path]]:
    """The files that are there, newest first; a crash between two renames leaves a gap."""
    found = [(0, path)] if path.is_file() else []
    for other in path.parent.glob(f'{path.stem}-*{path.suffix}'):
        number = other.stem.removeprefix(f'{path.stem}-')
        if number.isdecimal() and other.is_file():
            found.append((int(number), other))
    return iter(sorted(found))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return [path for _, path in _generations(folder / LAST)]


def check_file(path: str | Path) -> Path:
    """The path of a file, or what is there instead."""
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f'no checkpoint file {path}: it is a folder, give a file in it such as {LAST}')
        if not path.is_file():
            raise InputError(f'no checkpoint file {path}')
    except OSError as error:  # a folder above it that may not be entered
        raise _inaccessible(path, error) from error
    return path


def unreadable(path: str | Path, error: Exception) -> InputError:
    """WrongCheckpoint for whatever a library raised, or InaccessibleCheckpoint if the file cannot be read at all."""
    if isinstance(error, OSError) and error.errno not in _DAMAGED_OFFSET:
        return _inaccessible(path, error)
    try:
        with open(path, 'rb') as stream:
            while stream.read(1 << 24):
                pass
    except OSError as refusal:  # where torch's message does not say so
        return _inaccessible(path, refusal)
    reason = first_line(error).split('. ')[0]
    return WrongCheckpoint(f'cannot read checkpoint {path}: damaged, cut off, or of another kind ({reason[:100]})')


def _inaccessible(path: str | Path, error: OSError) -> InaccessibleCheckpoint:
    return InaccessibleCheckpoint(
        f'cannot read checkpoint {path}: {error.strerror}; it stays where it is: make it readable, or move it away'
    )


def read_checkpoint(path: str | Path, any_format: bool = False) -> dict[str, Any]:
    """Read a checkpoint of ours (or, if asked, any dict) without executing anything in it.

    Nothing is built before the whole description has been found to be that of a checkpoint.
    """
    path = check_file(path)
    try:
        plan = inspect_file(path)
        ours = isinstance(plan, dict) and plan.get('format') == FORMAT
        fault = find_fault(plan) if ours else None
        if fault:
            raise ValueError(fault)
        if not ours and not (any_format and isinstance(plan, dict)):
            raise _foreign(path, plan)
        content = torch.load(path, map_location='cpu', weights_only=True)
    except WrongCheckpoint:
        raise
    except DAMAGE as error:
        raise unreadable(path, error) from error
    if ours:
        expected = content.pop('checksum', None)
        if checksum(content) != expected:
            raise WrongCheckpoint(f'cannot read checkpoint {path}: its content does not match its checksum')
    return content


def _foreign(path: Path, plan: Any) -> WrongCheckpoint:
    if isinstance(plan, dict) and plan.get('format') == _FIRST_FORMAT and 'state_dict' in plan:
        return WrongCheckpoint(
            f'{path} is a checkpoint of format {_FIRST_FORMAT}: continue it once with nprf_vit at commit '
            f'{_LAST_READER}, which writes format {FORMAT}; its weights alone can be read by initial_checkpoint'
        )
    kind = f'{path} is no checkpoint of this package (format {FORMAT})'
    return WrongCheckpoint(f'{kind}: train.py reads others by initial_checkpoint')


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights in a file of torch.save: ours, DeiT's, timm's, or a bare state dict."""
    path = check_file(path)
    try:
        plan = inspect_file(path)
        key = next((k for k in _WEIGHTS_OF if isinstance(plan, dict) and k in plan), None)
        if not is_state_dict(plan if key is None else plan[key]):
            raise ValueError('it holds no state dict of dense tensors' + (f' under {key}' if key else ''))
        content = torch.load(path, map_location='cpu', weights_only=True)
    except DAMAGE as error:
        raise unreadable(path, error) from error
    return content if key is None else content[key]


def newest_good(
    folder: Path, check: Callable[[dict[str, Any], str], None], known: dict[Path, str] | None = None
) -> tuple[Path | None, dict[str, Any] | None, dict[Path, str]]:
    """The newest checkpoint that is whole and passes `check`, and what is wrong with newer ones, by file.

    Without any file there is nothing to continue; with nothing but bad ones, or where one cannot be read, the user
    decides.

    Args:
        known: Files of which it is known already what is wrong with them.
    """
    bad: dict[Path, str] = {}
    for path in checkpoints(folder):
        try:
            if known and path in known:
                raise WrongCheckpoint(known[path])
            content = read_checkpoint(path)
            check(content, str(path))
            return path, content, bad
        except InaccessibleCheckpoint:
            raise
        except InputError as error:
            bad[path] = str(error)
    if bad:
        raise InputError('; '.join(bad.values()) + f'; {folder} holds no other checkpoint: remove it to begin anew')
    return None, None, {}


def set_aside(path: Path) -> Path:
    """Take a bad file out of the generations, so that it does not push a good one out."""
    target = path.with_name(path.name + '.damaged')
    os.replace(path, target)
    return target
