"""torchao: linear layers in int8, weights alone and with activations."""

import pytest
import torch

from .small import batch, make

quantization = pytest.importorskip('torchao.quantization')
pytestmark = pytest.mark.slow


@pytest.mark.parametrize('config', ['Int8WeightOnlyConfig', 'Int8DynamicActivationInt8WeightConfig'])
def test_int8(config, tmp_path):
    x, _ = batch()
    model = make()
    with torch.no_grad():
        expected = model(x)
        quantization.quantize_(model, getattr(quantization, config)())
        actual = model(x)
    assert type(model.blocks[0].attn.qkv.weight) is not torch.nn.Parameter
    error = (actual - expected).norm() / expected.norm()
    assert 0 < error < 0.05, error
    torch.save(model.state_dict(), tmp_path / 'int8.pt')
    other = make()
    quantization.quantize_(other, getattr(quantization, config)())
    other.load_state_dict(torch.load(tmp_path / 'int8.pt', weights_only=False), assign=True)
    with torch.no_grad():
        assert torch.equal(other(x), actual)
