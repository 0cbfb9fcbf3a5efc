"""DeiT with a distillation token: a second token before the grid, and a second head that reads it."""

from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled

from .kernel_deit import KernelVisionTransformer, checkpoint_filter_fn

__all__ = ['KernelVisionTransformerDistilled', 'checkpoint_filter_fn']


class KernelVisionTransformerDistilled(KernelVisionTransformer, VisionTransformerDistilled):
    """A `KernelVisionTransformer` with the two tokens and two heads of timm's VisionTransformerDistilled.

    Its logits are the mean of both heads'; after `set_distilled_training()` a model in training mode returns the pair.

    Args:
        **kwargs: As for `KernelVisionTransformer`, but pooled by token and without register tokens.
    """

    distilled = True

    def __init__(self, global_pool: str = 'token', class_token: bool = True, **kwargs: Any) -> None:
        if global_pool != 'token' or not class_token or kwargs.get('reg_tokens', 0):
            raise ValueError(
                'the heads read the class and the distillation token: expected global_pool="token", class_token=True '
                f'and reg_tokens=0, got {global_pool!r}, {class_token} and {kwargs.get("reg_tokens", 0)}'
            )
        super().__init__(global_pool=global_pool, class_token=class_token, **kwargs)

    def _prefix_tokens(self) -> tuple[torch.Tensor | None, ...]:
        return self.cls_token, self.dist_token

    def forward_head(
        self, x: torch.Tensor, pre_logits: bool = False, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As in timm; a mask of patches changes nothing, as the heads read the two tokens alone."""
        return VisionTransformerDistilled.forward_head(self, x, pre_logits)
