"""Every command that a document prints is one: programs, options, keys of a configuration, files and extras exist."""

import argparse
import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from nprf_vit.config.yaml_file import load_config, make_config
from nprf_vit.errors import InputError

from .markdown import ROOT, Command, find_pages, read_commands

PLACEHOLDER = re.compile(r'[A-Z][A-Z_0-9]*|…')
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {'output', 'site', 'build'}
EXTRAS = set(re.findall(r'^(\w+) = \[', (ROOT / 'pyproject.toml').read_text(encoding='utf-8'), re.MULTILINE))
PAGES = {page.relative_to(ROOT).as_posix(): page for page in find_pages()}


class Built(Exception):
    """Carries a parser out of the command that built it."""


def parser_of(module: str) -> argparse.ArgumentParser | None:
    """What a command parses its arguments with, by starting it up to there; None where it takes none."""
    name = f'{module}.__main__' if (ROOT / module.replace('.', '/')).is_dir() else module
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin, f'python -m {module}: no such module'
    if module.startswith('examples') and not parses(Path(found.origin)):
        return None  # it would begin to work

    def stop(self, *args, **kwargs):
        raise Built(self)

    try:
        with warnings.catch_warnings(), patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_known_args=stop):
            warnings.simplefilter('ignore')  # of modules that a test has imported
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_module(name, run_name='__main__')
    except Built as built:
        return built.args[0]
    return None


def parses(file: Path) -> bool:
    """Whether an example has a command line, of its own or of its folder."""
    beside = [file] if file.parent.name == 'examples' else file.parent.glob('*.py')
    return any('argparse' in path.read_text(encoding='utf-8') for path in beside)


def target(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of ours that a command runs, and its arguments."""
    if words[0] == 'torchrun':
        script = next((i for i, word in enumerate(words) if word.endswith('.py')), None)
        return None if script is None else target(words[script:])
    if words[0] == 'python':
        return target(words[2:] if words[1] == '-m' else words[1:])
    name = {'nprf-train': 'train', 'nprf-validate': 'validate'}.get(words[0], words[0])
    module = name.removesuffix('.py').replace('/', '.')
    return None if PLACEHOLDER.fullmatch(module) or module in ('pytest', 'pip') else (module, words[1:])


def problem_of(command: Command) -> str:
    """What is wrong with a command, or ''."""
    words = command.words
    for word in words:
        first, slash, _ = word.partition('/')
        if slash and first in FOLDERS and not (ROOT / word.partition('::')[0]).exists():
            return f'{word} does not exist'
    if words[0] == 'pip':
        asked = {name for extras in re.findall(r'\[([\w,]+)\]', command.text) for name in extras.split(',')}
        return f'no extra {sorted(asked - EXTRAS)} in pyproject.toml' if asked - EXTRAS else ''
    run = None if words[0] == 'sbatch' else target(words)
    if run is None:
        return ''
    module, arguments = run
    parser = parser_of(module)
    if parser is None:
        return f'{module} takes no arguments' if arguments else ''
    with_numbers = ['1' if PLACEHOLDER.fullmatch(word) else re.sub(r'=[A-Z]+$', '=1', word) for word in arguments]
    problems = [parse_problem(parser, command, words) for words in (arguments, with_numbers)]
    return '' if '' in problems else problems[-1]


def parse_problem(parser: argparse.ArgumentParser, command: Command, arguments: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parsed = parser.parse_args(arguments)
    except SystemExit as ended:
        text = said.getvalue().strip().splitlines()[-1:]
        incomplete = not command.whole and any(' required' in line or ' expected ' in line for line in text)
        return '' if not ended.code or incomplete else text[0]
    return check_keys(parsed)


def check_keys(parsed: argparse.Namespace) -> str:
    """The configuration and what --set changes in it."""
    changes = [item for item in getattr(parsed, 'set', None) or [] if not item.startswith('KEY=')]
    config = getattr(parsed, 'config', None)
    try:
        if isinstance(config, str) and (ROOT / config).is_file():
            load_config(ROOT / config, changes)
        elif changes:
            make_config({'model': 'nprf_deit_base'}, changes)
    except InputError as error:
        return str(error)
    return ''


@pytest.mark.parametrize('name', list(PAGES))
def test_commands_exist(name, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['command'])
    problems = {command.text: problem_of(command) for command in read_commands(PAGES[name])}
    assert {text: problem for text, problem in problems.items() if problem} == {}


def test_commands_are_found(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(
        'Run `python -m\nnprf_vit.doctor --csv FILE` or `train.py --dry-run`.\n\n```\npip install x && \\\n  A=1 '
        'torchrun --nproc-per-node 8 train.py --config F  # why\noutput\ncd other\npython here.py x\n```\n'
    )
    found = read_commands(page, tmp_path)
    assert [(command.words, command.whole) for command in found] == [
        (['pip', 'install', 'x'], True),
        (['torchrun', '--nproc-per-node', '8', 'train.py', '--config', 'F'], True),
        (['python', '-m', 'nprf_vit.doctor', '--csv', 'FILE'], False),
        (['train.py', '--dry-run'], False),
    ]


@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        ('python -m nprf_vit.doctor --cvs FILE', 'unrecognized arguments: --cvs'),
        ('python train.py --config configs/digit.yaml', 'configs/digit.yaml does not exist'),
        ('python train.py --config configs/digits.yaml --set epoch=3', 'nearest valid key is epochs'),
        ('python train.py', 'arguments are required: --config'),
        (
            'torchrun --nproc-per-node 2 validate.py --config FILE --chekpoint FILE',
            'unrecognized arguments: --chekpoint',
        ),
        ('pip install -e ".[digits,plots]"', "no extra ['plots']"),
        ('python -m nprf_vit.config.reference --page', 'takes no arguments'),
        ('python examples/own_folders.py FOLDER', 'does not exist'),
    ],
)
def test_a_wrong_command_is_noticed(text, problem):
    assert problem in problem_of(Command('page.md', text, True))


def test_words_that_may_be_left_out_are_tried():
    command = Command(
        'page.md',
        'python -m nprf_vit.sample --checkpoint FILE --output FILE --complete IMAGE [IMAGE ...] [--seed S]',
        True,
    )
    assert command.words == shlex.split(re.sub(r'[\[\]]| \.\.\.', '', command.text))
    assert problem_of(command) == ''
