"""train.py, asked to stop after a given step by one rank only: python stopping.py CONFIG OUTPUT STEP"""

import os
import sys
from pathlib import Path

from nprf_vit.engine.config_file import load_config
from nprf_vit.engine.distributed import process_group
from nprf_vit.engine.train import train

if __name__ == '__main__':
    file, output, stop_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    asks = os.environ.get('RANK', '0') == '1'
    with process_group('cpu') as place:
        train(load_config(file), place, output, 'auto', lambda step: asks and step >= stop_at)
