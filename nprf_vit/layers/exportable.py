"""Models whose attention runs in plain operators, so that what is exported of them stands alone. docs/export.md."""

from types import TracebackType

from torch import nn

from .attention import KernelAttention


class set_exportable:  # noqa: N801  a function to its users, as timm's
    """Let every `KernelAttention` in a model run in plain PyTorch operators, or by this package's ops again.

    Plain operators are what `torch.export`, AOTInductor, `torch.jit.trace`, ONNX and other converters write into files
    that can be loaded without this package. Exact, and differentiable as often as asked. For training the ops are the
    better choice: autograd keeps what plain operators compute. As a context manager it restores what was before.

    Args:
        model: Any module with `KernelAttention` layers.
        exportable: Whether they run in plain operators.
    """

    def __init__(self, model: nn.Module, exportable: bool = True) -> None:
        layers = [module for module in model.modules() if isinstance(module, KernelAttention)]
        if not layers:
            raise ValueError(f'a {type(model).__name__} without KernelAttention has no ops of this package to replace')
        self._before = [(layer, layer.exportable) for layer in layers]
        for layer in layers:
            layer.exportable = bool(exportable)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer, exportable in self._before:
            layer.exportable = exportable
