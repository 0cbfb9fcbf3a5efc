"""Kernels in Triton's interpreter. It must be chosen before Triton is imported, so these run in a process of their own.

TRITON_INTERPRET=1 python -m pytest tests/interpreted    tests/ops/test_interpreted.py does so in the default suite
"""

import os

collect_ignore_glob = [] if os.environ.get('TRITON_INTERPRET') == '1' else ['test_*.py']
