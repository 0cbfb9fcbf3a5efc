"""peft: LoRA on the projections, trained, saved, loaded and merged."""

import pytest
import torch

from .small import batch, make

peft = pytest.importorskip('peft')
pytestmark = pytest.mark.slow


def test_lora(tmp_path):
    base, (x, y) = make(), batch()
    before = base(x)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=['qkv', 'proj', 'fc1'], modules_to_save=['head'])
    config.target_modules = r'blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc1)'  # not the patch embedding's `proj`
    model = peft.get_peft_model(base, config)
    torch.testing.assert_close(model(x), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all('lora_' in name or 'head' in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    after = model(x)
    assert (after - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path).eval()
    assert torch.equal(loaded(x), after)
    torch.testing.assert_close(loaded.merge_and_unload()(x), after, rtol=1e-4, atol=1e-5)


def test_a_wrapped_projection_serves_cross_attention():
    """The layer cuts the rows of `qkv` apart for a context; a wrapped one it calls whole."""
    layer = make().blocks[0].attn
    x, context = torch.randn(2, 16, 32), torch.randn(2, 9, 32)
    expected = layer(x, context=context)
    wrapped = peft.get_peft_model(layer, peft.LoraConfig(r=2, target_modules=['qkv']))
    torch.testing.assert_close(wrapped(x, context=context), expected)
