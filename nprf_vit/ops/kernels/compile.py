"""Compiles recorded launches for a named GPU on any machine, and reads registers, spills and tensor cores from them.

No driver is needed: Triton compiles to cubin with its own ptxas and to hsaco with its own LLVM, and carries cuobjdump
and nvdisasm.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launch import Launch

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
SHARED_LIMIT = {'sm_80': 163 << 10, 'sm_90': 227 << 10, 'sm_100': 227 << 10, 'gfx942': 64 << 10}
_TYPES = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.int32: 'i32'}
_TOOLS = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin'
# HMMA: Ampere's; HGMMA: Hopper's asynchronous one; UTC...MMA: Blackwell's; v_mfma: AMD's
_TENSOR_CORE = re.compile(r'\b(HMMA|HGMMA|QGMMA|UTC\w*MMA|v_mfma\w*)')


class Compiled(NamedTuple):
    """What a launch became on one target."""

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: bool


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile with the types, constants and alignments of the launch's arguments."""
    kernel, gpu = launch.kernel, TARGETS[target]
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        if kernel.params[i].is_constexpr:
            if name == 'PRECISION' and gpu.backend == 'hip':
                value = 'ieee'  # no TF32 there
            signature[name], constants[name] = 'constexpr', value
            continue
        signature[name] = _type(value)
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[(i,)] = [['tt.divisibility', 16]]
        elif value == 1:
            signature[name], constants[name] = 'constexpr', 1
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options={'num_warps': launch.num_warps})
    read = _read_amd if gpu.backend == 'hip' else _read_nvidia
    registers, spill, tensor_cores = read(compiled)
    return Compiled(kernel.__name__, target, registers, spill, compiled.metadata.shared, tensor_cores)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return '*' + _TYPES[value.dtype]
    return 'i32' if -(2**31) <= value < 2**31 else 'i64'


def _read_nvidia(compiled: Any) -> tuple[int, int, bool]:
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage = _run('cuobjdump', '-res-usage', file.name)
        sass = _run('nvdisasm', '-c', file.name)
    found = re.search(r'REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)', usage)
    if found is None:
        raise RuntimeError(f'cuobjdump said nothing of registers: {usage[:200]}')
    spills = len(re.findall(r'\b(?:STL|LDL)\b', sass))
    return int(found[1]), max(int(found[2]), int(found[3])) if spills else 0, bool(_TENSOR_CORE.search(sass))


def _read_amd(compiled: Any) -> tuple[int, int, bool]:
    text = compiled.asm['amdgcn']
    registers = re.search(r'\.vgpr_count:\s*(\d+)', text)
    spilled = re.search(r'\.vgpr_spill_count:\s*(\d+)', text)
    if registers is None or spilled is None:
        raise RuntimeError(f'the assembly says nothing of registers: {text[:200]}')
    return int(registers[1]), 4 * int(spilled[1]), bool(_TENSOR_CORE.search(text))


def _run(tool: str, *args: str) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout
