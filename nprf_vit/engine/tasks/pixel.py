"""The likelihood of images, byte by byte: cross-entropy in training, bits per dimension in evaluation.

B batch, N bytes of an image, V levels.
"""

import math

import torch
import torch.nn.functional as F


class PixelLikelihood:
    """Mean -log p of the bytes; evaluation has -log2 p of each image over its N bytes, and its standard error."""

    def mix(self, images, targets, step, epoch, first_slot):
        return images, targets

    def loss(self, logits, targets):
        return self._nats(logits, targets).mean()

    def measure(self, logits, targets, indices):
        bits = self._nats(logits, targets).double().mean(1) / math.log(2)  # B
        return {'bits': bits.sum(), 'bits_squared': bits.square().sum()}

    def summarize(self, totals, count):
        """The images are a sample: the error is the deviation of their bits over √count."""
        mean = totals['bits'] / count
        variance = max(0.0, totals['bits_squared'] - count * mean * mean) / max(1, count - 1)
        return {'bpd': mean, 'bpd_se': math.sqrt(variance / count), 'loss': mean * math.log(2)}

    def is_better(self, new, old):
        return new < old

    @staticmethod
    def _nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """-log p of each byte: logits (B, N, V) and rasters of at least N bytes to (B, N)."""
        targets = targets[:, : logits.shape[1]].long()
        return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction='none')
