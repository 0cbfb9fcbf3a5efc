"""What docs/faq.md says that `auto` takes."""

from nprf_vit.ops import choose_backend

CASE = {'m': 32, 'd': 64, 'causal': False, 'has_bias': True}
assert choose_backend((64, 64), **CASE) == choose_backend((118, 118), **CASE) == 'direct'
assert choose_backend((128, 128), **CASE) == 'fft'
assert choose_backend((64, 64), **CASE, cells=(14, 14)) == 'cells'
assert choose_backend((20, 20), **CASE, cells=(14, 14)) == 'direct'
assert choose_backend((64, 64), **CASE, radius=(13, 13)) == 'window'
assert choose_backend((64, 64), **CASE | {'has_bias': False}) == 'linear'
