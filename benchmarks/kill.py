"""Kill a real training at random moments, continue it each time, and compare its end with that of a quiet one.

python -m benchmarks.kill
python -m benchmarks.kill --processes 2 --name kill_two_processes
python -m benchmarks.kill --signal SIGTERM --name preempt

The run is configs/digits.yaml, shortened, with two loader workers and a checkpoint after every step, so that many
kills fall into the writing of one. The signal goes to the command that a user would have started.
"""

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from nprf_vit.engine.checkpoint.checksum import checksum
from nprf_vit.engine.checkpoint.file import checkpoints, read_checkpoint
from nprf_vit.engine.output.csv_file import format_rows, read_rows
from nprf_vit.errors import InputError

from .report import Report, fresh_folder

TIMING = ('images_per_s', 'data_wait', 'seconds')


def command(folder: Path, processes: int, epochs: int) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes)]
    settings = [f'epochs={epochs}', 'warmup_epochs=1', 'val_interval=1', 'workers=2', 'recovery_interval=1']
    settings += ['log_interval=5', 'batch_size=16']
    args = ['train.py', '--config', 'configs/digits.yaml', '--output', str(folder), '--resume', 'auto', '--set']
    return [*start, *args, *settings]


def launch(folder: Path, processes: int, epochs: int) -> subprocess.Popen:
    log = open(folder.with_suffix('.log'), 'ab')  # noqa: SIM115 - the process writes to it
    return subprocess.Popen(command(folder, processes, epochs), stdout=log, stderr=subprocess.STDOUT)


def quiet_run(folder: Path, processes: int, epochs: int) -> tuple[float, float]:
    """Seconds until the first checkpoint, and from there to the end."""
    begin = time.perf_counter()
    process = launch(folder, processes, epochs)
    while not (folder / 'last.pt').exists() and process.poll() is None:
        time.sleep(0.02)
    first = time.perf_counter()
    if process.wait():
        raise RuntimeError(folder.with_suffix('.log').read_text())
    return first - begin, time.perf_counter() - first


def step_of(folder: Path) -> int:
    """Of the newest checkpoint that can be read; -1 without one."""
    for path in checkpoints(folder):
        try:
            return read_checkpoint(path)['step']
        except InputError:
            continue
    return -1


def starts(folder: Path) -> int:
    try:
        return len(json.loads((folder / 'launches.json').read_text()))
    except OSError:
        return 0


def run_until_signal(folder: Path, seconds: float, processes: int, epochs: int, number: signal.Signals) -> dict | None:
    """Start, wait, send the signal; None if the run came to its end before."""
    before = starts(folder)
    process = launch(folder, processes, epochs)
    try:
        process.wait(timeout=seconds)
        return None
    except subprocess.TimeoutExpired:
        sent = time.perf_counter()
        process.send_signal(number)
        code = process.wait()
    left = time.perf_counter() - sent
    time.sleep(0.5)  # what died with it is gone, and its files stand still
    writing = sorted(path.name.split('.')[1] for path in folder.glob('.*.tmp'))
    doing = f'writing {"+".join(writing)}' if writing else 'under way' if starts(folder) > before else 'starting'
    row = {'alive_s': round(seconds, 2), 'was': doing, 'checkpoint_step': step_of(folder)}
    return row | {'left_after_s': round(left, 2), 'code': code}


def ending(folder: Path) -> dict[str, str]:
    """Digests of all that two runs must have in common at their ends."""
    content, best = read_checkpoint(folder / 'last.pt'), read_checkpoint(folder / 'best.pt')
    found = {name: checksum(content[name]) for name in ('state_dict', 'state_dict_ema', 'optimizer', 'generators')}
    found['best.pt'] = checksum([best['state_dict'], best['state_dict_ema']])
    for name in ('summary.csv', 'steps.csv'):
        rows = [{k: v for k, v in row.items() if k not in TIMING} for row in read_rows(folder / name)]
        found[name] = f'{len(rows)} rows {checksum(rows)}'
    return found


def measure(folder: Path, kills: int, processes: int, epochs: int, seed: int, number: signal.Signals):
    """A row per kill, and the ends of the quiet run and of the other."""
    start, training = quiet_run(folder / 'quiet', processes, epochs)
    rng, rows = random.Random(seed), []
    progress = tqdm(total=kills, desc='kills', disable=not sys.stderr.isatty())
    while len(rows) < kills:
        if rng.random() < 0.2:
            seconds = rng.uniform(0.3, 1) * start
        else:  # on average 3/4 of the run are done at the last kill
            seconds = start + rng.uniform(0, 1.9) * training / kills
        row = run_until_signal(folder / 'killed', seconds, processes, epochs, number)
        if row is None:
            break
        rows.append({'kill': len(rows) + 1, **row})
        progress.update()
    progress.close()
    if launch(folder / 'killed', processes, epochs).wait():
        raise RuntimeError((folder / 'killed.log').read_text()[-4000:])
    return rows, ending(folder / 'quiet'), ending(folder / 'killed')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--processes', type=int, default=1)
    parser.add_argument('--epochs', type=int, default=5)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--signal', default='SIGKILL', choices=('SIGKILL', 'SIGTERM', 'SIGINT', 'SIGUSR1'))
    parser.add_argument('--name', default='kill', help='of the CSV file')
    parser.add_argument('--output', type=Path, help='folder for the CSV file (default: a new one in output/)')
    parser.add_argument('--keep', metavar='DIR', help='an empty folder for both runs and what they said')
    args = parser.parse_args()
    with contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        number = signal.Signals[args.signal]
        rows, quiet, killed = measure(Path(folder), args.kills, args.processes, args.epochs, args.seed, number)
    Report(args.output or fresh_folder(args.name)).save({args.name: rows})
    print(format_rows(rows, list(rows[0])), end='')
    print(f'{len(rows)} kills')
    for name, digest in quiet.items():
        print(f'{name:<16}{digest:<46}{"the same" if killed[name] == digest else "DIFFERENT: " + killed[name]}')
    return int(quiet != killed)


if __name__ == '__main__':
    sys.exit(main())
