"""ImageNet ReaL labels (Beyer et al., arXiv 2006.07159): an answer counts when it is one of an image's labels."""

from pathlib import Path

import torch
from timm.data import RealLabelsImagenet

from nprf_vit.errors import InputError, first_line

from .images import ImageSource


class RealLabels:
    """Label sets by image index; images without any label are left out of the average, as the authors do."""

    def __init__(self, source: ImageSource, labels: str) -> None:
        names = [Path(source.filename(index)).name for index in range(len(source))]
        if labels != 'bundled' and not Path(labels).is_file():
            raise InputError(f'no ReaL label file {labels}; "bundled" takes the labels inside timm')
        try:
            by_name = RealLabelsImagenet(names, real_json=None if labels == 'bundled' else labels).real_labels
        except AssertionError:
            raise InputError(f'ReaL labels {labels} are not as many as the {len(names)} validation images') from None
        except (ValueError, TypeError) as error:
            raise InputError(f'cannot read ReaL labels {labels}: {first_line(error)}') from None
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise InputError(f'no ReaL label for {unknown[0]}: expected names like ILSVRC2012_val_00000001.JPEG')
        self.labels = [set(by_name[name]) for name in names]

    def measure(self, ranked: torch.Tensor, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sums for ranked predictions (B, 5) of the images with these indices."""
        counts = [0, 0, 0]
        for row, index in zip(ranked.tolist(), indices.tolist()):
            labels = self.labels[index]
            if labels:
                counts[0] += 1
                counts[1] += row[0] in labels
                counts[2] += not labels.isdisjoint(row)
        values = torch.tensor(counts, dtype=torch.float64, device=ranked.device)
        return {'real_images': values[0], 'real_top1': values[1], 'real_top5': values[2]}
