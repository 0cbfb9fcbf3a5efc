"""What tests read in documents: the pages, their blocks of Python, and the commands they tell people to type."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ('docs', 'examples', 'experiments', 'benchmarks', 'slurm', 'configs')
# of lines: fence, language, text, the same fence; blocks inside lists are indented
FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```\s*$', re.MULTILINE | re.DOTALL
)
PROGRAMS = r'python|torchrun|nprf-train|nprf-validate|(?:train|validate)\.py(?= --)|pip install|sbatch'
COMMAND = re.compile(rf'(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) \S')


def find_pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown file of the project, new ones too."""
    found = [*root.glob('*.md'), *(page for folder in FOLDERS for page in (root / folder).rglob('*.md'))]
    return sorted(found)


class Block(NamedTuple):
    """A fenced block of a page."""

    name: str  # page#section, with a number from the second one of a section on
    language: str
    line: int  # of its first line, counted from one
    text: str


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def read_blocks(page: Path, root: Path = ROOT) -> list[Block]:
    text = page.read_text(encoding='utf-8')
    found: list[Block] = []
    counts: Counter = Counter()
    for match in FENCE.finditer(text):
        before = FENCE.sub('', text[: match.start()])  # a comment in code is no heading
        headings = re.findall(r'^#+ (.*)$', before, re.MULTILINE)
        name = f'{page.relative_to(root).as_posix()}#{anchor(headings[-1]) if headings else ""}'
        language = match['language'].strip()
        counts[name, language] += 1
        if counts[name, language] > 1:
            name = f'{name}-{counts[name, language]}'
        code = re.sub(rf'^{match["indent"]}', '', match['text'], flags=re.MULTILINE)
        found.append(Block(name, language, text[: match.start('text')].count('\n') + 1, code))
    return found


def python_blocks(page: Path, root: Path = ROOT) -> list[Block]:
    return [block for block in read_blocks(page, root) if block.language == 'python']


class Command(NamedTuple):
    """A command as printed: the program, and its words."""

    page: str
    text: str
    whole: bool  # to be typed as it stands; in a sentence only the words that matter may be there

    @property
    def words(self) -> list[str]:
        """Without comments, redirections and the brackets around what may be left out."""
        text = re.sub(r'[\[\]]|\s\.\.\.', ' ', re.sub(r'\[(?=\d)|(?<=\d)\]', '', self.text))
        words = shlex.split(text, comments=True)
        while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
            words.pop(0)
        return words[: words.index('>')] if '>' in words else words


def read_commands(page: Path, root: Path = ROOT) -> list[Command]:
    """From blocks without a language or of a shell, and from code in sentences."""
    name = page.relative_to(root).as_posix()
    shell = [b.text for b in read_blocks(page, root) if b.language in ('', 'bash', 'sh', 'shell', 'console')]
    # what follows a change of folder runs elsewhere
    here = [re.split(r'^cd \S|&& cd \S', text, flags=re.MULTILINE)[0] for text in shell]
    lines = [line for text in here for line in text.replace('\\\n', ' ').splitlines()]
    prose = FENCE.sub('', page.read_text(encoding='utf-8'))
    spans = re.findall(r'`([^`]+)`', prose)
    return [Command(name, part, True) for part in _parts(lines)] + [
        Command(name, part, False) for part in _parts(spans)
    ]


def _parts(lines: list[str]) -> list[str]:
    """The commands among them, each once."""
    parts = [' '.join(part.split()).removeprefix('$ ') for line in lines for part in line.split('&&')]
    parts = [_without_brackets(part) for part in dict.fromkeys(parts)]
    return [part for part in parts if COMMAND.match(part)]


def _without_brackets(part: str) -> str:
    """A command inside $(...) that ends the line."""
    while part.endswith(')') and part.count(')') > part.count('('):
        part = part[:-1]
    return part
