"""Tables and figures of the documents, from the CSV files in docs/results.

python -m benchmarks.tables            brings README.md and docs/*.md up to date, and says which it changed
python -m benchmarks.tables --check    changes nothing; exit code 1 if a document and a CSV file disagree

A table stands between `<!-- table NAME -->` and `<!-- end -->`. Figures in sentences are found by the words around them
(benchmarks/quotes.py).
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks.quotes import QUOTES
from benchmarks.report import markdown
from benchmarks.speed_tables import TABLES as SPEED
from experiments.claim_tables import TABLES as CLAIMS

ROOT = Path(__file__).parent.parent
TABLES = SPEED | CLAIMS
BLOCK = re.compile(r'(<!-- table (\w+) -->\n)(?:.*?\n)??(<!-- end -->)', re.S)  # a new one has no lines yet
NUMBER = r'([\d.,]*\d)'


def documents() -> list[Path]:
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def update(text: str, name: str) -> str:
    """The text of a document, its tables and figures as the CSV files have them."""
    text = BLOCK.sub(lambda block: f'{block[1]}{markdown(TABLES[block[2]]())}\n{block[3]}', text)
    for words, figures in QUOTES.get(name, {}).items():
        text = replace_figures(text, words, figures(), name)
    return text


def replace_figures(text: str, words: str, figures: list, name: str) -> str:
    """The text with the figures in the place of `{}` in the words, which may be broken over lines."""
    parts = [r'\s+'.join(map(re.escape, part.split(' '))) for part in words.split('{}')]
    found = list(re.finditer(NUMBER.join(parts), text))
    if len(found) != 1:
        raise ValueError(f'{name} has {len(found)} times what benchmarks/quotes.py looks for: {words}')
    spans = [found[0].span(i + 1) for i in range(len(figures))]
    for (start, end), figure in sorted(zip(spans, figures), reverse=True):
        text = text[:start] + str(figure) + text[end:]
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='change nothing')
    args = parser.parse_args(argv)
    changed = 0
    for path in documents():
        old = path.read_text(encoding='utf-8')
        new = update(old, path.name)
        if new != old:
            changed += 1
            print(f'{path.name}: {"disagrees with docs/results" if args.check else "updated"}')
            if not args.check:
                path.write_text(new, encoding='utf-8')
    return int(args.check and changed > 0)


if __name__ == '__main__':
    sys.exit(main())
