"""Colour, boxes and progress bars: on a real terminal, and nowhere else."""

import io
import re

import pytest

from nprf_vit.terminal import boxed, coloured
from tests.engine.running import ROOT, launch, small_config
from tests.pty_run import COLOUR, on_terminal

DIGITS = ROOT / 'docs' / 'results' / 'digits'
VALIDATE = ('--config', DIGITS / 'config.yaml', '--checkpoint', DIGITS / 'model.safetensors', '--set', 'workers=0')


class Terminal(io.StringIO):
    encoding = 'utf-8'

    def isatty(self):
        return True


class Ascii(Terminal):
    encoding = 'ascii'


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ('NO_COLOR', 'TERM'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('COLUMNS', '40')


def test_a_pipe_gets_the_words_alone():
    assert coloured('x', io.StringIO(), 'red') == 'x' and boxed('x', io.StringIO()) == 'x'


def test_a_terminal_gets_colour_and_a_box():
    assert coloured('x', Terminal(), 'bold', 'red') == '\x1b[1;31mx\x1b[0m'
    assert boxed('x\nlonger', Terminal(), 'title') == '╭─ title ─╮\n│ x       │\n│ longer  │\n╰─────────╯'


def test_colour_takes_no_room_in_a_box():
    lines = boxed(f'{coloured("x", Terminal(), "green")}\nlonger', Terminal()).splitlines()
    assert len({len(re.sub(r'\x1b\[[\d;]*m', '', line)) for line in lines}) == 1


@pytest.mark.parametrize(('name', 'value'), [('NO_COLOR', '1'), ('TERM', 'dumb')])
def test_who_wants_no_colour_gets_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert coloured('x', Terminal(), 'red') == 'x' and boxed('x', Terminal()).startswith('╭')


def test_an_empty_no_color_is_none(monkeypatch):
    monkeypatch.setenv('NO_COLOR', '')
    assert coloured('x', Terminal(), 'red') != 'x'


def test_a_box_that_does_not_fit_is_left_out():
    assert boxed('x' * 36, Terminal()) != 'x' * 36 and boxed('x' * 37, Terminal()) == 'x' * 37


def test_a_terminal_without_such_characters_gets_others():
    assert boxed('x', Ascii()) == '+---+\n| x |\n+---+'


def test_validate_on_a_terminal_has_a_bar_with_the_time_left_and_a_box():
    # the bar shows every update, however fast the machine is
    command = ['validate.py', *VALIDATE, '--set', 'validation_batch_size=24']
    code, shown = on_terminal(command, TQDM_MININTERVAL='0', TQDM_MINITERS='1')
    assert code == 0, shown
    assert re.search(r'evaluating: +\d+%\|.*\| \d+/360 \[\d+:\d+<\d+:\d+, +[\d.]+ images/s', shown)
    assert re.search(r'│ nprf_deit_tiny +98\.61', shown) and '╰──' in shown


def test_validate_into_a_pipe_prints_the_table_alone():
    done = launch('validate.py', *VALIDATE)
    assert COLOUR not in done.stdout + done.stderr and '│' not in done.stdout and 'evaluating' not in done.stderr
    assert re.search(r'^nprf_deit_tiny +98\.61 .* 360$', done.stdout, re.MULTILINE)


def test_an_error_is_red_on_a_terminal_unless_nobody_wants_it():
    code, shown = on_terminal(['train.py', '--config', 'nowhere.yaml'])
    assert code == 2 and '\x1b[1;31merror:\x1b[0m no configuration file nowhere.yaml' in shown
    code, shown = on_terminal(['train.py', '--config', 'nowhere.yaml'], NO_COLOR='1')
    assert code == 2 and 'error: no configuration file nowhere.yaml' in shown and COLOUR not in shown


def test_training_ends_with_a_box_on_a_terminal(tmp_path):
    from nprf_vit.config.yaml_file import dump_config

    (tmp_path / 'small.yaml').write_text(dump_config(small_config(epochs=2)), encoding='utf-8')
    code, shown = on_terminal(['train.py', '--config', tmp_path / 'small.yaml', '--output', tmp_path / 'run'], 300)
    assert code == 0, shown
    last = shown[shown.rindex('╭') :]
    assert re.search(r'│ nprf_deit_tiny .*360 +│\r\n', last) and '│ \x1b[32mbest top1 ' in last
    assert 'epoch 1/2' in shown and '\x1b[1mnprf_deit_tiny with ' in shown
    # what is kept has none of it
    kept = [path for path in (tmp_path / 'run').iterdir() if path.suffix in ('.csv', '.json', '.jsonl', '.yaml')]
    assert len(kept) >= 3 and not [path.name for path in kept if COLOUR in path.read_text(encoding='utf-8')]
