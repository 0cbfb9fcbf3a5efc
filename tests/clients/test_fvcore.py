"""fvcore: its counter knows the ops by the handles that we give it."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import nprf_vit  # noqa: F401  registers the models
from nprf_vit.ops.flops import fvcore_handles

fvcore_nn = pytest.importorskip('fvcore.nn')
pytestmark = pytest.mark.slow


@pytest.mark.parametrize('kwargs', [{}, {'class_token': True}, {'rel_pos': 'none'}], ids=str)
def test_the_attention_is_counted(kwargs):
    model = timm.create_model('nprf_deit_tiny', depth=2, **kwargs).eval()
    image = torch.randn(1, 3, 224, 224)
    analysis = fvcore_nn.FlopCountAnalysis(model, image).unsupported_ops_warnings(False)
    analysis.set_op_handle(**fvcore_handles())
    found = analysis.by_operator()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    expected = {str(op): n for op, n in counter.get_flop_counts()['Global'].items() if 'attend' in str(op)}
    (name,) = expected
    assert found[name.removeprefix('nprf_vit.')] == expected[name] // 2
    assert not any('nprf' in op or 'attend' in op for op in analysis.unsupported_ops())
