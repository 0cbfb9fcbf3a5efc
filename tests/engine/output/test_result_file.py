"""Where results go: files, devices, pipes, closed and full streams, paths that cannot exist."""

import json
import os
import subprocess
import sys
import threading

import pytest

from nprf_vit.engine.output.result_file import ResultFile
from nprf_vit.errors import Exit, InputError
from tests.engine.running import ROOT, config_file, launch, run_here

from .disks import fill, small_disk

LONG = ['x' * 5000, 'x' * 300, '/'.join(['x' * 200] * 25)]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    run_here(folder / 'out', epochs=1, warmup_epochs=0)
    return ['--config', config_file(folder, epochs=1, warmup_epochs=0), '--checkpoint', folder / 'out' / 'last.pt']


def shell(line, *args, expect):
    """A command in a shell, whose redirections are those of a user."""
    line = line.replace('PYTHON', f'{sys.executable} {ROOT}/')
    done = subprocess.run(
        ['bash', '-c', line, 'bash', *map(str, args)], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_results_are_in_the_file_before_they_are_printed(trained, tmp_path):
    file = tmp_path / 'v.json'
    done = shell(f'PYTHONvalidate.py "$@" --json {file} > /dev/full', *trained, expect=Exit.NOT_SAVED)
    assert json.loads(file.read_text(encoding='utf-8'))['images'] == 360
    reason = 'cannot write the results to standard output: [Errno 28] No space left on device'
    assert done.stderr == f'error: {reason}; they are in {file}\n'


def test_results_on_a_full_disk_are_printed(trained, tmp_path):
    with small_disk(tmp_path / 'disk', '64k') as disk:
        fill(disk)
        done = launch('validate.py', *trained, '--json', disk / 'v.json', expect=Exit.NOT_SAVED)
        assert [path.name for path in disk.iterdir()] == ['filler']
    assert 'nprf_deit_tiny (EMA)' in done.stdout
    assert done.stderr.strip().endswith('they are in standard output')


def test_standard_output_as_the_file_gets_both(trained, tmp_path):
    file = tmp_path / 'all.txt'
    shell(f'PYTHONvalidate.py "$@" --json /dev/stdout > {file}', *trained, expect=0)
    text = file.read_text(encoding='utf-8')
    record, end = json.JSONDecoder().raw_decode(text)
    assert record['images'] == 360 and 'nprf_deit_tiny (EMA)' in text[end:]
    assert os.path.islink('/dev/stdout')


def test_all_streams_closed(tmp_path):
    file = config_file(tmp_path, epochs=1, warmup_epochs=0)
    shell(f'PYTHONtrain.py --config {file} --output {tmp_path}/out <&- >&- 2>&-', expect=0)
    assert (tmp_path / 'out' / 'last.pt').is_file()


def test_an_error_nobody_hears_keeps_its_code(tmp_path):
    for redirection in ('2>&-', '2>/dev/full', '>&- 2>&-'):
        shell(f'PYTHONtrain.py --config {tmp_path}/none.yaml {redirection}', expect=2)


def test_devices_and_pipes_are_written_into_and_stay(tmp_path):
    before = os.lstat('/dev/null')
    ResultFile('/dev/null', '--json').write('text')
    assert os.path.samestat(os.lstat('/dev/null'), before)
    with pytest.raises(OSError, match='No space left'):
        ResultFile('/dev/full', '--json').write('text')
    pipe, heard = tmp_path / 'pipe', []
    os.mkfifo(pipe)
    with pytest.raises(InputError, match='a pipe that nobody reads'):
        ResultFile(str(pipe), '--json')
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    target = ResultFile(str(pipe), '--json')
    os.set_blocking(descriptor, True)
    reader = threading.Thread(target=lambda: heard.append(open(descriptor).read()))  # noqa: SIM115
    reader.start()
    target.write('text' * 50_000)
    reader.join(60)
    assert heard == ['text' * 50_000] and pipe.is_fifo()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / 'link').symlink_to('file')
    (tmp_path / 'file').write_text('old', encoding='utf-8')
    ResultFile(str(tmp_path / 'link'), '--json').write('new')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'file').read_text(encoding='utf-8') == 'new'


@pytest.mark.parametrize('option', ['--config', '--checkpoint', '--data-dir', '--json', '--output', '--resume'])
def test_paths_that_cannot_exist(tmp_path, capsys, option):
    import train
    import validate

    file = str(config_file(tmp_path))
    for path in LONG:
        command = train if option in ('--output', '--resume') else validate
        assert command.main(['--config', file, option, path]) == 2
        said = capsys.readouterr().err
        assert said.count('\n') == 1 and f'{option} ' in said and 'File name too long' in said and len(said) < 400


@pytest.mark.parametrize('key', ['data_dir', 'initial_checkpoint', 'real_labels'])
def test_keys_with_paths_that_cannot_exist(tmp_path, capsys, key):
    import train

    file = str(config_file(tmp_path))
    for path in LONG:
        assert train.main(['--config', file, '--output', str(tmp_path / 'out'), '--set', f'{key}={path}']) == 2
        said = capsys.readouterr().err
        assert said.count('\n') == 1 and key in said and len(said) < 1000
    assert not (tmp_path / 'out').exists()
