"""What docs/extending.md adds is used: compared with the dense oracle, and trained with."""

import contextlib
import io
from pathlib import Path

import timm
import torch

import nprf_vit
from nprf_vit.config.yaml_file import make_config
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.train import train
from nprf_vit.ops import draw_projection, feature_map, kernel_attention, reference


def trained(folder, **changes):
    settings = {
        'model': 'nprf_deit_micro',
        'img_size': 8,
        'in_chans': 1,
        'mean': [0.3],
        'std': [0.37],
        'no_aug': True,
        'crop_pct': 1.0,
        'workers': 0,
        'global_batch': 32,
        'batch_size': 32,
        'epochs': 4,
        'warmup_epochs': 1,
        'lr': 4e-3,
    }
    with process_group('cpu', 1) as place:
        return train(make_config(settings | changes), place, Path(folder))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


q, k, v, b, far = leaves((2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 5), (3, 3, 5), (3,))
w = draw_projection(3, 7, 4, 'softplus').double()
for bias, beyond, grid, causal in (
    (b, None, (2, 3), False),
    (b[:, :, 1:4], far, (2, 3), False),
    (None, None, (2, 3), False),
    (None, None, None, True),
):
    found = {}
    for backend in ('matrix', 'direct'):
        phi = (feature_map(x, w, 'softplus', role) for x, role in ((q, 'query'), (k, 'key')))
        z = kernel_attention(*phi, v, bias, beyond, grid, causal, backend)
        inputs = [x for x in (q, k, v, bias, beyond) if x is not None]
        found[backend] = [z, *torch.autograd.grad(z.square().sum(), inputs)]
    for got, expected in zip(*found.values()):
        close(got, expected)
phi_q, phi_k = torch.nn.functional.softplus(q @ w.mT), torch.nn.functional.softplus(k @ w.mT)
close(
    kernel_attention(phi_q, phi_k, v, b, grid_size=(2, 3), backend='matrix'),
    reference.attention(phi_q, phi_k, v, b, grid_size=(2, 3)),
)
assert nprf_vit.ops.choose_backend((4, 4), 8, 8, False, True) == 'direct'

model = timm.create_model('nprf_deit_micro', kernel='softplus', attn_backend='matrix').double()
image = torch.randn(2, 1, 8, 8, dtype=torch.float64)
other = timm.create_model('nprf_deit_micro', kernel='softplus').double()
other.load_state_dict(model.state_dict())
close(model(image), other(image))

model = timm.create_model('nprf_deit_micro')
assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10) and len(model.bias_modules()) == 2

row = trained('stripes', dataset='stripes', num_classes=2)
assert row['top1'] > 90, row

value = {'task': 'digit_value', 'eval_metric': 'error', 'num_classes': 1, 'model_kwargs': {'pos_embed': 'learn'}}
with contextlib.redirect_stdout(io.StringIO()) as said:
    row = trained('value', **value, dataset='digits', epochs=10)
assert 'off by ' in said.getvalue()
assert row['error'] < 2, row  # always answering the mean, 4.5, is off by 2.5
