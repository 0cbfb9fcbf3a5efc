"""The streaming reader itself (wds), on tar shards of real scans."""

import io
import json
import tarfile

import pytest

from nprf_vit.data.datasets.digits import Digits
from nprf_vit.engine.checkpoint.file import read_checkpoint
from nprf_vit.errors import InputError

from .running import run_here, same

SHARDS = 2


def write_shard(path, digits, indices):
    with tarfile.open(path, 'w') as tar:
        for i in indices:
            image, target = digits[i]
            png = io.BytesIO()
            image.save(png, 'PNG')
            for ending, data in (('png', png.getvalue()), ('cls', str(int(target)).encode())):
                entry = tarfile.TarInfo(f'{i:05d}.{ending}')
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    """All digits as the shards and the _info.json that timm's reader looks for."""
    root, splits = tmp_path_factory.mktemp('shards'), {}
    for split in ('train', 'validation'):
        digits, names, counts = Digits(split), [], []
        for shard in range(SHARDS):
            names.append(f'digits-{split}-{shard}.tar')
            indices = range(shard, len(digits), SHARDS)
            counts.append(len(indices))
            write_shard(root / names[-1], digits, indices)
        splits[split] = {'name': split, 'num_samples': len(digits), 'filenames': names, 'shard_lengths': counts}
    (root / '_info.json').write_text(json.dumps({'splits': splits}))
    return {'dataset': 'wds/', 'data_dir': str(root), 'aug_repeats': 1, 'global_batch': 256, 'batch_size': 64}


def test_every_image_is_validated_once_and_resume_is_exact(shards, tmp_path):
    whole = run_here(tmp_path / 'a', **shards)
    assert whole['images'] == 360
    steps = read_checkpoint(tmp_path / 'a' / 'last.pt')['step'] // 2
    run_here(tmp_path / 'b', stop_at=steps + 1, **shards)
    assert read_checkpoint(tmp_path / 'b' / 'last.pt')['step'] == steps
    run_here(tmp_path / 'b', resume='auto', **shards)
    a, b = (read_checkpoint(tmp_path / name / 'last.pt') for name in 'ab')
    assert same(a['state_dict'], b['state_dict']) == []


def test_workers_validate_every_image_once_too(shards, tmp_path):
    assert run_here(tmp_path, **shards, workers=2)['images'] == 360


def test_a_damaged_index_is_named(shards, tmp_path):
    (tmp_path / '_info.json').write_text(json.dumps({'splits': {'train': {'num_samples': 1}}}))
    with pytest.raises(InputError, match=r"cannot open dataset wds/ in .*KeyError: 'filenames'"):
        run_here(tmp_path / 'out', **{**shards, 'data_dir': str(tmp_path)})
