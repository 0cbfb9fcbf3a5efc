"""A mode that raises for whatever would make the host wait for a GPU, inside our own ops too."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nprf_vit.ops import custom_op, partial

# Their results, or the sizes of these, are known to the device alone.
READS = {
    '_local_scalar_dense', 'item', 'is_nonzero', 'equal', 'nonzero', 'masked_select', 'unique_dim', '_unique',
    '_unique2', 'unique_consecutive', 'repeat_interleave', 'bincount', 'allclose', 'argwhere',
}  # fmt: skip
OPS = {
    'attend': custom_op.attend,
    'attend_backward': custom_op.attend_backward,
    'attend_partial': partial.attend_partial,
}


class HostReadError(RuntimeError):
    pass


class NoHostReads(TorchDispatchMode):
    """Custom ops are opened; copies between devices and boolean indices count as reads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen.append(name)
        if name in READS:
            raise HostReadError(name)
        if name in ('index', 'index_put_', 'index_put') and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            raise HostReadError(f'{name} by a mask')
        if function.namespace == 'nprf_vit' and name in OPS:
            with self:
                return OPS[name]._init_fn(*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        devices = {x.device for x in (*args, out) if isinstance(x, torch.Tensor) and x.dim()}
        if name in ('copy_', '_to_copy') and len(devices) > 1:
            raise HostReadError(f'{name} between {devices}')
        return out
