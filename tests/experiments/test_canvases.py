"""Canvases: every patch keeps its picture's label, and windows of the trained size that slide see what they should."""

import torch

from experiments import canvases
from experiments.command import main


def test_quick_run(tmp_path):
    assert main('canvases', 'about', canvases.experiment, True, ['--quick', '--output', str(tmp_path)]) == 0
    assert (tmp_path / 'quick_canvases.png').stat().st_size > 5_000
    rows = (tmp_path / 'quick_canvases.csv').read_text().splitlines()
    assert len(rows) == 1 + 2 * 6 * 4 - 1  # trained on 2×2, no window fits a canvas of 1×1
    logs = [path.read_text() for path in tmp_path.glob('runs/canvases_*/log.txt')]
    assert len(logs) == 2 and all('loss' in log and 'nan' not in log for log in logs)


def test_without_data_it_is_said(tmp_path, capsys):
    assert main('canvases', 'about', canvases.experiment, True, ['--output', str(tmp_path)]) == 2
    assert 'expected --data-dir DIR' in capsys.readouterr().err


def test_labels_lie_where_their_pictures_are():
    pictures = torch.arange(10.0)[:, None, None].expand(10, 8, 8)
    images, labels = canvases.canvases(pictures, torch.arange(10), 3)
    assert images.shape == (1, 1, 24, 24) and labels.shape == (1, 6, 6)
    torch.testing.assert_close(images[0, 0, ::4, ::4], labels[0].float())
    assert labels[0, ::2, ::2].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_sliding_windows_are_the_mean_of_those_that_see_a_patch():
    def first_pixel(images):  # a "model" whose answer tells which window it saw
        logits = torch.zeros(len(images), 4, 4, 10)
        logits[..., 0] = images[:, 0, :1, :1]
        return logits

    images = torch.arange(3.0)[:, None].mul(3).add(torch.arange(3.0)).repeat_interleave(8, 0).repeat_interleave(8, 1)
    out = canvases.sliding(images[None, None], first_pixel, 2, 8)[0, ..., 0]
    one = torch.tensor([0.0, 1, 3, 4]).exp()
    one = one / (one + 9)  # of the four windows, by the number of their first picture
    assert out.shape == (6, 6)
    torch.testing.assert_close(out[0, 0], one[0])
    torch.testing.assert_close(out[0, 2], one[:2].mean())
    torch.testing.assert_close(out[2, 2], one.mean())
    torch.testing.assert_close(out[5, 5], one[3])
