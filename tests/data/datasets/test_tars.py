"""A split in a tar: whole, or refused; never a smaller set."""

import io
import tarfile

import pytest

from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets.images import open_source
from nprf_vit.errors import InputError
from tests.data.folders import digit_folder


def open_train(root):
    return open_source(make_config({'model': 'm', 'data_dir': str(root)}), 'train')


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    root = digit_folder(tmp_path_factory.mktemp('images'), train=6, val=1) / 'train'
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob('*.png'))}


def packed(images, extra=()):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode='w') as tar:
        for name, content in images.items():
            add(tar, name, content)
        for name in extra:
            add(tar, name, b'text' * 400)
    return stream.getvalue()


@pytest.fixture(scope='module')
def nested(images):
    """As ImageNet's: a tar of a tar per class."""
    classes = {name.split('/')[0] for name in images}
    inner = {c: packed({n.split('/')[1]: x for n, x in images.items() if n.startswith(c)}) for c in sorted(classes)}
    return packed({f'{name}.tar': content for name, content in inner.items()})


def test_whole_tars(tmp_path, images, nested):
    for content in (packed(images), packed(images, extra=['README', 'more.txt']), nested):
        (tmp_path / 'train.tar').write_bytes(content)
        source = open_train(tmp_path)
        assert len(source) == 24 and source[23][0].size == (8, 8)


def test_no_images(tmp_path, images):
    for content in (b'', b'garbage' * 1000, bytes(512 * 20), packed({}, ['README']), packed(images)[:100]):
        (tmp_path / 'train.tar').write_bytes(content)
        with pytest.raises(InputError, match=r'cannot read .*train.tar as an uncompressed tar|holds no images'):
            open_train(tmp_path)


def test_every_cut_is_refused(tmp_path, images, nested):
    for content in (packed(images, extra=['README']), nested):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            list(tar)
            end = tar.offset  # zeros from here on
        for length in (*range(512, end, 512 * 3), *range(700, end, 1999), end - 1, end):
            (tmp_path / 'train.tar').write_bytes(content[:length])
            with pytest.raises(InputError, match=r'cannot read .*train.tar as an uncompressed tar|holds no images'):
                open_train(tmp_path)


def test_a_damaged_header_is_not_the_end(tmp_path, images):
    content = bytearray(packed(images))
    with tarfile.open(fileobj=io.BytesIO(bytes(content))) as tar:
        offset = tar.getmembers()[12].offset
    content[offset : offset + 20] = b'x' * 20
    (tmp_path / 'train.tar').write_bytes(content)
    with pytest.raises(InputError, match=f'damaged at byte {offset}, before the end of the archive'):
        open_train(tmp_path)


def test_files_with_holes_are_refused(tmp_path, images):
    """A sparse member of a few bytes may claim terabytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode='w', format=tarfile.GNU_FORMAT) as tar:
        add(tar, 'a/0.png', next(iter(images.values())))
        member = tarfile.TarInfo('a/1.png')
        member.type = tarfile.GNUTYPE_SPARSE
        block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        block[386:410] = b'00000000000\x0000000000000\x00'
        block[483:495] = b'77777777777\x00'  # 8 GB
        block[148:156] = b'%06o\x00 ' % tarfile.calc_chksums(bytes(block))[0]
        tar.fileobj.write(bytes(block))
        tar.offset += 512
    (tmp_path / 'train.tar').write_bytes(stream.getvalue())
    with pytest.raises(InputError, match=r'a/1.png has holes'):
        open_train(tmp_path)
