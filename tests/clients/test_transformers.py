"""transformers: its wrapper of timm's models reads a folder that `save_for_hf` wrote."""

import json

import pytest
import torch
from timm.models._hub import save_for_hf

from .small import SMALL, batch, make

transformers = pytest.importorskip('transformers')
pytestmark = pytest.mark.slow


def save(model, folder):
    """timm 1.0.31 writes `num_classes` among the arguments, and the wrapper passes one of its own beside them."""
    save_for_hf(model, str(folder), model_args=SMALL)
    config = json.loads((folder / 'config.json').read_text())
    config['model_args'].pop('num_classes')
    (folder / 'config.json').write_text(json.dumps(config))


def test_classification(tmp_path):
    model, (x, y) = make(), batch(2)
    save(model, tmp_path / 'timm')
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'timm').eval()
    assert type(wrapped).__name__ == 'TimmWrapperForImageClassification'
    with torch.no_grad():
        assert torch.equal(wrapped(x).logits, model(x))
    out = wrapped(x, labels=y)
    out.loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters())
    wrapped.save_pretrained(tmp_path / 'again')
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'again').eval()
    with torch.no_grad():
        assert torch.equal(again(x).logits, model(x))


def test_features(tmp_path):
    model, (x, _) = make(), batch(2)
    save(model, tmp_path)
    wrapped = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x).last_hidden_state, model.forward_features(x))
