"""What tensor cores do to float32 operands, in the interpreter: its products are float32's own otherwise."""

import numpy as np
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from nprf_vit.ops.backends import fused, fused_qkv

# TF32 keeps 10 bits: half a unit to nearest, a whole one where hardware drops the rest.
NEAREST, DROPPED = 2.0**-11, 2.0**-10


def tf32(x, dropped=False):
    """float32 numbers as TF32: to nearest, ties away from zero (cvt.rna.tf32), or with the last 13 bits dropped."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    if not dropped:
        bits = bits + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def product(a, b, precision, dropped):
    """a·b in float32, TF32, or three products of TF32 parts, of which lo·lo is left out; sums in float32."""
    if a.dtype != np.float32 or precision == ir.INPUT_PRECISION.IEEE:
        return np.matmul(a, b, dtype=np.float32)
    high_a, high_b = tf32(a, dropped), tf32(b, dropped)
    result = np.matmul(high_a, high_b)
    if precision == ir.INPUT_PRECISION.TF32x3:
        result = (np.matmul(tf32(a - high_a, dropped), high_b) + np.matmul(high_a, tf32(b - high_b, dropped))) + result
    return result


def emulate(monkeypatch, precision, dropped=False):
    """Products of float32 as a GPU takes them for `precision`, 'tf32' or 'tf32x3'; returns what each was asked for."""
    seen = []

    def create_dot(a, b, d, input_precision, max_num_imprecise_acc):
        seen.append(input_precision)
        return TensorHandle(product(a.data, b.data, input_precision, dropped) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, 'create_dot', create_dot)
    monkeypatch.setattr(fused, 'precision', lambda dtype: precision)
    monkeypatch.setattr(fused_qkv, 'feature_precision', lambda: 'tf32x3')
    return seen
