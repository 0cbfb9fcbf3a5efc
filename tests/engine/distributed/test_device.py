"""Which device a process computes on. There is no accelerator here: what torch offers is made up."""

import contextlib

import pytest
import torch

from nprf_vit.engine.distributed import process_group
from nprf_vit.engine.distributed.process_group import choose_device
from nprf_vit.errors import InputError


@pytest.fixture
def offer(monkeypatch):
    """Lets torch offer a number of devices of a kind; returns the devices that were set."""
    chosen = []

    class Module:
        set_device = staticmethod(chosen.append)

    def offer(kind, count):
        monkeypatch.setattr(torch.accelerator, 'is_available', lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda: kind and torch.device(kind))
        monkeypatch.setattr(torch.accelerator, 'device_count', lambda: count)
        monkeypatch.setattr(torch, 'get_device_module', lambda device=None: Module)
        return chosen

    return offer


@pytest.mark.parametrize('kind', ['cuda', 'xpu'])
def test_auto_takes_what_torch_offers(offer, kind):
    chosen = offer(kind, 2)
    assert choose_device('auto', 1) == choose_device(kind, 1) == torch.device(kind, 1) and chosen == [1, 1]
    assert choose_device('cpu', 1) == torch.device('cpu')
    with pytest.raises(InputError, match='local rank 2 has no GPU: this node has 2'):
        choose_device('auto', 2)


def test_mps_is_one_device(offer):
    offer('mps', 1)
    assert choose_device('auto') == torch.device('mps')
    with pytest.raises(InputError, match='device cuda was asked for, but torch sees no CUDA device, only mps'):
        choose_device('cuda')


def test_without_any_the_cpu(offer):
    offer(None, 0)
    assert choose_device('auto') == torch.device('cpu')
    for kind in ('cuda', 'xpu', 'mps'):
        with pytest.raises(InputError, match=f'device {kind} was asked for, but torch sees no {kind.upper()} device'):
            choose_device(kind)


def test_several_ranks_need_a_way_to_exchange(offer, monkeypatch):
    offer('mps', 2)
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setattr(process_group, 'die_with_parent', lambda: None)
    with pytest.raises(InputError, match='2 processes cannot be joined on mps'), contextlib.ExitStack() as stack:
        stack.enter_context(process_group.process_group('auto'))
