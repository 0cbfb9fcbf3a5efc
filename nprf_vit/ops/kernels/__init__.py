"""Triton kernels of the backend `fused`, one family per file. Compiled and interpreted, not yet run on a GPU."""
