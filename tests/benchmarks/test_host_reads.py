"""A training step on a GPU makes the host wait for one small copy at most, and that after the next step has begun."""

import pytest
import torch

from benchmarks.host_reads import count, main
from nprf_vit.engine.tasks.classification import Classification
from tests.engine.running import small_config


def total(found):
    return {part: sum(reads.values()) for part, reads in found.items()}


@pytest.mark.parametrize('changes', [{}, {'clip_grad': 1.0}, {'rel_pos_lr_scale': 10.0}])
def test_adamw_reads_nothing_but_the_outcome(changes):
    found = count(small_config(batch_size=64, **changes))
    assert total(found) == {'gradients': 0, 'update': 1, 'outcome': 0}, found
    assert [what for what in found['update'] if what.startswith('copy to the host: engine/transfer.py')]


def test_other_optimizers_read_it_before_they_update():
    found = count(small_config(opt='sgd'))
    assert total(found) == {'gradients': 0, 'update': 1, 'outcome': 0}, found


def test_a_read_is_noticed(monkeypatch):
    plain = Classification.loss

    def curious(self, logits, targets):
        loss = plain(self, logits, targets)
        return loss if loss.item() > 1e9 else loss * torch.tensor([1.0], device='cpu').to(loss.device)[0]

    monkeypatch.setattr(Classification, 'loss', curious)
    found = count(small_config(batch_size=128))
    assert total(found)['gradients'] == 2, found


def test_the_command_lists_them(capsys):
    assert main(['--config', 'configs/digits.yaml']) == 0
    assert 'update: 1\n  1 x copy to the host' in capsys.readouterr().out
