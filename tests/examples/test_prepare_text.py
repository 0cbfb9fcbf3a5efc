"""Text out of Debian packages, which the tests build themselves with the system's own tool."""

import gettext
import io
import shutil
import struct
import subprocess
import zlib

import pytest

from examples.language import prepare_text

pytestmark = pytest.mark.skipif(shutil.which('dpkg-deb') is None, reason='dpkg-deb is not installed')


def r_vector(strings):
    """A vector of strings as R serializes it for a lazy-load database."""
    data = b'X\n' + struct.pack('>iii', 3, 0x40201, 0x30500) + struct.pack('>i', 5) + b'UTF-8'
    data += struct.pack('>ii', 16, len(strings))
    for text in strings:
        data += struct.pack('>ii', 0x40009, len(text.encode())) + text.encode()
    return struct.pack('>I', len(data)) + zlib.compress(data)


def catalogue(messages):
    """A .mo file: a header, two tables of lengths and offsets, and the strings."""
    messages = {'': 'Content-Type: text/plain; charset=UTF-8\n', **messages}
    pairs = sorted((a.encode(), b.encode()) for a, b in messages.items())
    at, texts, tables = 28 + 16 * len(pairs), b'', [b'', b'']
    for side in (0, 1):
        for pair in pairs:
            tables[side] += struct.pack('<II', len(pair[side]), at + len(texts))
            texts += pair[side] + b'\0'
    header = struct.pack('<7I', 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return header + tables[0] + tables[1] + texts


def package(debs, name, files):
    root = debs / 'build' / name
    control = (
        f'Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: x\n'
    )
    for path, content in {**files, 'DEBIAN/control': control.encode()}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    subprocess.run(['dpkg-deb', '--build', '--root-owner-group', root, debs / f'{name}_1_all.deb'], check=True)


@pytest.fixture(scope='module')
def debs(tmp_path_factory):
    debs = tmp_path_factory.mktemp('debs')
    novel = ['EMMA', '', 'By Jane Austen', '']
    for number in range(1, 41):
        novel += [f'CHAPTER {number}', '', 'Emma Woodhouse, handsome, clever,', f'and _rich_ in {number}.', '']
        novel += ['“Oh!” said Emma Woodhouse.', '']
    package(debs, prepare_text.NOVELS, {'usr/lib/R/data/Rdata.rdb': r_vector(novel)})
    for k, name in enumerate(prepare_text.CATALOGUES):
        messages = {f'Open the file {i} of {k}': f'Die Datei {i} von {k} öffnen' for i in range(60)}
        messages |= {f'Open it {i}': 'Sie öffnen' for i in range(20)}  # one translation of many
        messages |= {'Save %s now': '%s jetzt sichern', 'menu\x04Close all files': 'Alle Dateien schließen', 'OK': 'Ja'}
        package(debs, name, {f'usr/share/locale/de/LC_MESSAGES/{name}.mo': catalogue(messages)})
    return debs


def read(folder, name):
    return (folder / name).read_text(encoding='utf-8').split('\n')[:-1]


def test_novels(debs, tmp_path):
    prepare_text.novels(debs, tmp_path)
    wiki = [line for split in prepare_text.SPLITS for line in read(tmp_path, f'wiki.{split}.tokens')]
    headings = [line for line in wiki if line.startswith(' = ')]
    assert len(headings) == 40 and all(line.startswith(' = Emma , chapter ') for line in headings)
    assert sum('handsome , clever , and rich in' in line for line in wiki) == 40
    assert ' “ Oh ! ” said Emma Woodhouse . ' in wiki and all(line[0] == line[-1] == ' ' for line in wiki)
    train = ' '.join(read(tmp_path, 'wiki.train.tokens')).split()
    assert min(train.count(word) for word in set(train)) >= 3 and '<unk>' in train
    for split in ('valid', 'test'):
        assert set(' '.join(read(tmp_path, f'wiki.{split}.tokens')).split()) <= set(train)
    plain = read(tmp_path, 'train.txt')
    assert (
        plain[1] == '“Oh!” said Emma Woodhouse.' and plain[2] == '' and plain[0].startswith('Emma Woodhouse, handsome')
    )


def test_messages(debs, tmp_path):
    prepare_text.messages(debs, tmp_path)
    sides = {language: {s: read(tmp_path, f'{s}.{language}') for s in prepare_text.SPLITS} for language in ('de', 'en')}
    for language in sides:
        train, valid, test = (set(map(str.lower, lines)) for lines in sides[language].values())
        assert not train & valid and not train & test and not valid & test
        assert len(train) > 10 * len(test) > 0
    pairs = [pair for s in prepare_text.SPLITS for pair in zip(sides['de'][s], sides['en'][s])]
    assert ('Die Datei 3 von 4 öffnen', 'Open the file 3 of 4') in pairs
    assert ('Alle Dateien schließen', 'Close all files') in pairs
    assert not any('%' in german or english == 'OK' for german, english in pairs)


def test_the_same_files_again(debs, tmp_path):
    for name in ('a', 'b'):
        prepare_text.messages(debs, tmp_path / name)
    assert all((tmp_path / 'b' / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / 'a').iterdir())


def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(SystemExit, match='^error: no .*apt-get download r-cran-janeaustenr$'):
        prepare_text.novels(tmp_path, tmp_path)


def test_the_catalogue_of_these_tests_is_one():
    assert gettext.GNUTranslations(io.BytesIO(catalogue({'a b': 'ä c'}))).gettext('a b') == 'ä c'
