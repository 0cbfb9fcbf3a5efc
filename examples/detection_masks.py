"""A torchvision detector on our backbone whose features do not depend on the padding of a batch.

python examples/detection_masks.py

torchvision lays images of different sizes on one canvas (`ImageList`) and hands its backbone the canvas alone. Padding
then takes part in attention over the whole image: what a photograph's features are depends on its neighbours in the
batch. A mask made of `image_sizes` takes the padding out, exactly. The photographs are scikit-learn's two (CC BY 2.0),
one of them turned to portrait format; the weights are random.

It prints:

    without the mask a neighbour in the batch moves features by 8.57%
    with the mask a neighbour in the batch moves features by 0.00%
    a training step: loss_classifier 1.140, loss_box_reg 0.042, loss_objectness 0.692, loss_rpn_box_reg 0.001
"""

# B batch, C channels, H×W grid of patches
import timm
import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import nprf_vit  # noqa: F401  registers the models

PATCH = 16
SHORT, LONG = 160, 240  # sides of the resized photographs


def patch_mask(image_sizes: list[tuple[int, int]], height: int, width: int) -> torch.Tensor:
    """Which patches of a canvas of height×width pixels show anything of their image: (B, H, W) of bool."""
    sizes = torch.tensor(image_sizes)
    rows, cols = torch.arange(0, height, PATCH), torch.arange(0, width, PATCH)  # first pixels
    return (rows < sizes[:, :1])[:, :, None] & (cols < sizes[:, 1:])[:, None, :]


class MaskedBackbone(nn.Module):
    """The last map of an `nprf_deit`, zero where there is only padding.

    Zeros, because a convolution over the map alone would find zeros beyond its border too.
    """

    def __init__(self, model: nn.Module, masked: bool = True) -> None:
        super().__init__()
        self.model = model
        self.masked = masked
        self.out_channels = model.num_features
        self.image_sizes: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = patch_mask(self.image_sizes, *x.shape[-2:]).to(x.device) if self.masked else None
        (last,) = self.model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True, attn_mask=mask)
        return last if mask is None else last.masked_fill(~mask[:, None], 0)  # B, C, H, W


def make_detector(masked: bool = True, num_classes: int = 3) -> FasterRCNN:
    """Faster R-CNN with one map of stride 16; `rel_pos_extend='extend'`, as an offset means the same on any canvas."""
    torch.manual_seed(0)
    options = {'img_size': (SHORT, LONG), 'rel_pos_extend': 'extend', 'dynamic_img_size': True}
    model = timm.create_model('nprf_deit_tiny', num_classes=0, depth=4, **options)
    backbone = MaskedBackbone(model, masked)
    detector = FasterRCNN(
        backbone,
        num_classes,
        min_size=SHORT,
        max_size=LONG,
        rpn_anchor_generator=AnchorGenerator(sizes=((32, 64, 128),), aspect_ratios=((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(['0'], output_size=7, sampling_ratio=2),
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_test=50,
        box_detections_per_img=10,
    )

    def tell_sizes(_, __, output):  # the detector passes its backbone no more than the canvas
        backbone.image_sizes = output[0].image_sizes

    detector.transform.register_forward_hook(tell_sizes)
    return detector


def photographs() -> list[torch.Tensor]:
    """Two photographs, (3, 427, 640) and (3, 640, 427), in [0, 1]."""
    wide, tall = (torch.from_numpy(x.copy()).permute(2, 0, 1) / 255 for x in load_sample_images().images)
    return [wide, tall.transpose(1, 2).contiguous()]


@torch.no_grad()
def moved_by_padding(detector: FasterRCNN) -> float:
    """How far the first photograph's map is from itself when the second one joins the batch, relative to its norm."""
    images = photographs()
    maps = []
    for batch in (images[:1], images):
        padded, _ = detector.transform(batch)
        maps.append(detector.backbone(padded.tensors)[0])
    height, width = (-(-s // PATCH) for s in padded.image_sizes[0])
    alone, together = (x[:, :height, :width] for x in maps)
    return ((together - alone).norm() / alone.norm()).item()


def main() -> None:
    for masked in (False, True):
        moved = moved_by_padding(make_detector(masked).eval())
        print(f'{"with" if masked else "without"} the mask a neighbour in the batch moves features by {moved:.2%}')
    detector = make_detector()
    targets = [
        {'boxes': torch.tensor([[100.0, 100.0, 300.0, 300.0]]), 'labels': torch.tensor([label])} for label in (1, 2)
    ]
    losses = detector(photographs(), targets)
    sum(losses.values()).backward()
    print('a training step:', ', '.join(f'{name} {loss.item():.3f}' for name, loss in losses.items()))


if __name__ == '__main__':
    main()
