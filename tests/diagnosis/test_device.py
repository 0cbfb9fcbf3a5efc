"""What the doctor asks of a device. CUDA's own parts run here on stand-ins for torch.cuda: no GPU is at hand."""

import contextlib

import pytest
import torch

from nprf_vit.diagnosis import device
from nprf_vit.diagnosis.device import Examination


@pytest.mark.parametrize('backend', ['direct', 'fft', 'linear', 'window', 'cells', 'auto'])
def test_on_the_cpu_bits_alone_are_told(backend):
    found = device.examine(backend, 'cpu')
    assert found == Examination(True, None, None, None) and found.faults() == []
    assert found.quantities() == {'same bits': 1.0} and str(found) == 'same bits twice'


def test_backends_without_a_promise_are_left_out():
    assert device.examine('flex', 'cpu') is None and device.examine('step', 'cpu') is None


def test_bits_that_change_are_noticed(monkeypatch):
    real = device.kernel_attention
    monkeypatch.setattr(device, 'kernel_attention', lambda *a, **k: real(*a, **k) + 1e-6 * torch.rand(()))
    assert device.examine('direct', 'cpu').faults() == ['two runs differ']


def test_what_is_written_down():
    good, bad = Examination(True, 12.0, '', ''), Examination(False, 12.0, 'item', 'illegal')
    assert good.quantities() == {'same bits': 1, 'peak MB': 12, 'host reads': 0, 'graph capture': 1}
    assert bad.quantities() == {'same bits': 0, 'peak MB': 12, 'host reads': 1, 'graph capture': 0}
    assert str(good) == 'same bits twice, 12 MB, nothing read on the host, captured in a CUDA graph'
    assert bad.faults() == ['two runs differ', 'the host reads: item', 'no CUDA graph: illegal']


def test_a_synchronisation_is_named_and_the_mode_put_back(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', modes.append)

    def waits():
        assert modes[-1] == 'error'
        raise RuntimeError('called a synchronizing CUDA operation\nmore')

    assert device.host_read(waits) == 'called a synchronizing CUDA operation'
    assert device.host_read(lambda: ()) == ''
    assert modes == ['error', 'default'] * 2


class Graph:
    """Replays by running the step again into the tensors that were captured."""

    def __init__(self, step, error=0.0):
        self.step, self.error, self.captured = step, error, None

    def replay(self):
        for mine, new in zip(self.captured, self.step()):
            mine.copy_(new + self.error)


@pytest.mark.parametrize('error', [0.0, 1.0])
def test_a_graph_must_repeat_the_step(monkeypatch, error):
    def step():
        out = (torch.arange(3.0),)
        graph.captured = out if capturing else graph.captured
        return out

    graph, capturing = Graph(step, error), []

    @contextlib.contextmanager
    def capture(_):
        capturing.append(True)
        yield
        capturing.clear()

    class Stream:
        def wait_stream(self, other):
            pass

    for name, stand_in in {
        'Stream': Stream,
        'current_stream': Stream,
        'stream': lambda _: contextlib.nullcontext(),
        'CUDAGraph': lambda: graph,
        'graph': capture,
        'synchronize': lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert device.capture_fault(step) == ('a replay differs from the step itself' if error else '')
