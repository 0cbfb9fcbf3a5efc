"""Runs train.py as a worker of torchrun and notes how and when it ended, which an agent that is cut off does not tell.

python recorded.py FOLDER [arguments of train.py]
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from nprf_vit.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[3]

if __name__ == '__main__':
    die_with_parent()
    code = subprocess.call([sys.executable, '-u', str(ROOT / 'train.py'), *sys.argv[2:]])
    with open(Path(sys.argv[1]) / f'end{os.environ["RANK"]}', 'a', encoding='utf-8') as stream:
        stream.write(f'{code} {time.time()}\n')
    sys.exit(code)
