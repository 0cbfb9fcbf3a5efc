"""Real text in the formats of WikiText-103, IWSLT14 and BERT's pre-training, out of Debian packages: no other download.

  mkdir debs && cd debs && apt-get download PACKAGE ...    (no root needed; --list prints the names)
  python -m examples.language.prepare_text --debs debs --output text

text/novels: wiki.{train,valid,test}.tokens and {train,valid,test}.txt, the six novels of Jane Austen, which the package
  r-cran-janeaustenr has from Project Gutenberg. The text is in the public domain, the package under the MIT licence.
text/messages: {train,valid,test}.{de,en}, messages of programs and their translations, from gettext catalogues. Their
  licences are those of the programs: GPL 2 or 3 or later, LGPL 2.1 (GTK), MPL 2 (LibreOffice), Vim's.

The split is by chapter (of the novels) and by English message, chosen by a hash, so it is the same whenever it is made
from the same packages. No chapter and no message, in either language, is in two splits.
"""

import argparse
import gettext
import hashlib
import io
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

NOVELS = 'r-cran-janeaustenr'
CATALOGUES = (
    'digikam-data', 'evolution-common', 'gimp-data', 'git', 'gnucash-common', 'gnumeric-common', 'inkscape',
    'krita-l10n', 'libgtk-3-common', 'libreoffice-l10n-de', 'vim-runtime',
)  # fmt: skip
CHAPTER = re.compile(r'^\s*(CHAPTER|Chapter) ([IVXLC]+|\d+)\.?\s*$')
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\w\s]", re.UNICODE)
MARKUP = set('<>%{}$\\|~_&@=')
SPLITS = ('train', 'valid', 'test')


def split_of(text: str) -> str:
    """90 % train, 5 % each valid and test, by the text alone."""
    share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big') / 2**64
    return 'train' if share < 0.9 else 'valid' if share < 0.95 else 'test'


def package_files(debs: Path, package: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """The files of a package whose names end so, in order of their names."""
    found = sorted(debs.glob(f'{package}_*.deb'))
    if not found:
        raise SystemExit(f'error: no {debs}/{package}_*.deb: get it there by apt-get download {package}')
    listing = subprocess.run(['dpkg-deb', '--fsys-tarfile', str(found[-1])], capture_output=True)
    if listing.returncode:
        raise SystemExit(f'error: {found[-1]} is not a Debian package: {listing.stderr.decode().strip()}')
    with tarfile.open(fileobj=io.BytesIO(listing.stdout)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            stream = archive.extractfile(member) if member.isfile() and member.name.endswith(suffix) else None
            if stream is not None:
                yield member.name, stream.read()


def character_vectors(database: bytes) -> Iterator[list[str]]:
    """The vectors of strings in R's lazy-load database: objects of a length and a zlib stream, one after another."""
    while database:
        stream = zlib.decompressobj()
        data, database = stream.decompress(database[4:]), stream.unused_data
        native = struct.unpack('>i', data[14:18])[0]  # after 'X\n', three versions: the name of an encoding
        kind, count = struct.unpack('>ii', data[18 + native : 26 + native])
        if kind & 0xFF != 16:  # STRSXP
            continue
        at, strings = 26 + native, []
        for _ in range(count):
            size = max(0, struct.unpack('>i', data[at + 4 : at + 8])[0])  # -1 is R's missing value
            strings.append(data[at + 8 : at + 8 + size].decode('utf-8'))
            at += 8 + size
        yield strings


def chapters(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The chapters of a novel: a title and its paragraphs, each in one line."""
    title, number, paragraphs, current = lines[0].strip().title(), 0, [], []
    for line in [*lines[1:], 'CHAPTER I']:
        if CHAPTER.match(line):
            paragraphs += [' '.join(current)] if current else []
            if number and paragraphs:
                yield f'{title} , chapter {number}', paragraphs
            number, paragraphs, current = number + 1, [], []
        elif line.strip():
            current.append(line.strip().replace('_', ''))
        elif current:
            paragraphs, current = [*paragraphs, ' '.join(current)], []


def wiki_lines(title: str, paragraphs: list[str]) -> list[str]:
    """As WikiText has an article: words between blanks, a heading between equals signs, empty lines around it."""
    words = (' '.join(WORD.findall(paragraph)) for paragraph in paragraphs)
    return [' ', f' = {title} = ', ' ', *(f' {line} ' for line in words if line)]


def novels(debs: Path, output: Path) -> None:
    wiki: dict[str, list[str]] = {split: [] for split in SPLITS}
    plain: dict[str, list[str]] = {split: [] for split in SPLITS}
    (database,) = (content for name, content in package_files(debs, NOVELS, 'data/Rdata.rdb'))
    for lines in character_vectors(database):
        for title, paragraphs in chapters(lines):
            split = split_of(title)
            wiki[split] += wiki_lines(title, paragraphs)
            plain[split] += [*paragraphs, '']
    counts = Counter(word for line in wiki['train'] for word in line.split())
    for split in SPLITS:  # words of the training text with fewer than three uses are rare, in all splits
        rare = (' ' + ''.join(f'{w if counts[w] >= 3 else "<unk>"} ' for w in line.split()) for line in wiki[split])
        write(output / f'wiki.{split}.tokens', rare)
        write(output / f'{split}.txt', plain[split])


def messages(debs: Path, output: Path) -> None:
    pairs: dict[str, str] = {}
    for package in CATALOGUES:
        for name, content in package_files(debs, package, '.mo'):
            if '/de/LC_MESSAGES/' not in name:
                continue
            for english, german in gettext.GNUTranslations(io.BytesIO(content))._catalog.items():
                if isinstance(english, str) and is_sentence(english := english.split('\x04')[-1], german):
                    pairs.setdefault(english, german)
    seen: dict[str, str] = {}  # a German sentence stays in the split that had it first
    parts: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for english, german in sorted(pairs.items()):
        split = split_of(english.lower())
        if seen.setdefault(german.lower(), split) == split:
            parts[split].append((german, english))
    for split, rows in parts.items():
        rows.sort(key=lambda row: hashlib.blake2b(row[1].encode()).digest())  # not by the alphabet
        write(output / f'{split}.de', (german for german, _ in rows))
        write(output / f'{split}.en', (english for _, english in rows))


def is_sentence(english: str, german: str) -> bool:
    """Two to twenty words in one line, without markup or placeholders, and translated."""
    text = english + german
    if '\n' in text or '\r' in text or MARKUP & set(text) or english.lower() == german.lower():
        return False
    return all(2 <= len(part.split()) <= 20 and part == part.strip() for part in (english, german))


def write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = list(lines)
    path.write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
    print(f'{path}: {len(lines)} lines, {sum(len(line.split()) for line in lines)} words')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--list', action='store_true', help='print the names of the packages, and end')
    parser.add_argument('--debs', type=Path, help='folder of the downloaded packages')
    parser.add_argument('--output', type=Path, help='folder to write to')
    args = parser.parse_args()
    if args.list:
        print(NOVELS, *CATALOGUES)
        return 0
    if args.debs is None or args.output is None:
        parser.error('--debs and --output are missing')
    novels(args.debs, args.output / 'novels')
    messages(args.debs, args.output / 'messages')
    return 0


if __name__ == '__main__':
    sys.exit(main())
