"""train.py, whose rank 1 gets a signal after a given step: python stopping.py CONFIG OUTPUT STEP"""

import os
import signal
import sys
from pathlib import Path

from nprf_vit.config.yaml_file import load_config
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.preemption import EXIT_CODE, Preemption
from nprf_vit.engine.train import train

if __name__ == '__main__':
    file, output, stop_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def asked(step: int) -> bool:
        if os.environ.get('RANK', '0') == '1' and step == stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return preempted(step)

    with process_group('cpu') as place, Preemption() as preempted:
        done = train(load_config(file), place, output, 'auto', asked)
    sys.exit(EXIT_CODE if done is None else 0)
