"""Exit codes: each error has its own, all in one place, and the documents name every one of them."""

import re

import pytest

from nprf_vit import train as train_command
from nprf_vit import validate as validate_command
from nprf_vit.errors import Exit, InputError, NotSaved, RunError

from .running import ROOT, config_file


def test_the_documents_name_every_code():
    text = (ROOT / 'docs' / 'reliability.md').read_text(encoding='utf-8')
    table = text.split('## Exit codes')[1].split('## ')[0]
    assert {int(code) for code in re.findall(r'^\| (\d+) \|', table, re.MULTILINE)} == {int(code) for code in Exit}


@pytest.mark.parametrize('command', [train_command, validate_command])
@pytest.mark.parametrize(('error', 'code'), [(InputError, 2), (RunError, 1), (NotSaved, 74)])
def test_an_error_of_the_process_group_is_one_line(tmp_path, monkeypatch, capsys, command, error, code):
    def broken(*args):
        raise error('told')

    monkeypatch.setattr(command, 'process_group', broken)
    assert command.main(['--config', str(config_file(tmp_path))]) == code
    assert capsys.readouterr().err == 'error: told\n'
