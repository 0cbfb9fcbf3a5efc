"""EMA: the exponential moving average of the weights, measured beside them."""

from timm.utils import ModelEmaV3
from torch import nn

from nprf_vit.config.schema import Config


def build_ema(config: Config, model: nn.Module) -> ModelEmaV3 | None:
    if not config.model_ema:
        return None
    return ModelEmaV3(model, decay=config.model_ema_decay, use_warmup=config.model_ema_warmup)
