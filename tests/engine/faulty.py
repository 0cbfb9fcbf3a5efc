"""train.py with a fault in one rank at one step, once: python faulty.py CONFIG OUTPUT FAULT RANK STEP

FAULT is poison, die, hang, stop, or worker, the death of one of the rank's loader workers. RANK may be several, as in
2,3. A fault leaves a mark beside OUTPUT, so that a restarted group goes on without.
"""

import math
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from nprf_vit.engine.tasks.classification import Classification

FAULT, RANKS, STEP = sys.argv[3], sys.argv[4].split(','), int(sys.argv[5])


def install(output: Path) -> None:
    mix, rank = Classification.mix, os.environ.get('RANK', '0')
    mark = output.with_name(f'{output.name}.{FAULT}.{rank}')
    calls: dict[int, int] = {}

    def faulty(self, images, targets, step, epoch, slot):
        calls[step] = calls.get(step, 0) + 1
        images, targets = mix(self, images, targets, step, epoch, slot)
        if rank not in RANKS or step + 1 != STEP or (FAULT != 'poison' and mark.exists()):
            return images, targets
        if FAULT == 'poison':
            return (images * math.nan if calls[step] == 2 else images), targets
        mark.touch()
        if FAULT == 'worker':
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            return images, targets
        if FAULT == 'hang':
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if FAULT == 'die' else signal.SIGSTOP)
        return images, targets

    Classification.mix = faulty


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import train

    install(Path(sys.argv[2]))
    sys.exit(train.main(['--config', sys.argv[1], '--output', sys.argv[2], '--resume', 'auto']))
