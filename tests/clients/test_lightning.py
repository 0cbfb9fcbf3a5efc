"""Lightning: a few steps of fit, and the checkpoint that it writes."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from .small import batch, make

lightning = pytest.importorskip('lightning')
pytestmark = pytest.mark.slow


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize('precision', ['32-true', 'bf16-mixed'])
def test_fit(precision, tmp_path):
    module, (x, y) = Classifier(), batch(6)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = lightning.Trainer(
        max_steps=3, accelerator='cpu', devices=1, logger=False, enable_progress_bar=False, precision=precision,
        default_root_dir=tmp_path, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=2))
    assert trainer.global_step == 3
    assert all(not torch.equal(before[name], p) for name, p in module.named_parameters())
    trainer.save_checkpoint(tmp_path / 'last.ckpt')
    loaded = Classifier.load_from_checkpoint(tmp_path / 'last.ckpt').eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), module.eval()(x))
