import torch

from experiments import dense_features


def test_quick_run_draws_a_picture(tmp_path, capsys):
    dense_features.main(['--quick', '--output', str(tmp_path)])
    assert (tmp_path / 'quick_dense_features.png').stat().st_size > 10_000
    assert '96x144 px: features (1, 32, 6, 9)' in capsys.readouterr().out


def test_colours_mean_the_same_in_every_picture():
    small = torch.randn(8, 4, 6)
    large = small.repeat_interleave(2, 1).repeat_interleave(2, 2)
    first, second = dense_features.principal_colours([small, large])
    torch.testing.assert_close(second, first.repeat_interleave(2, 0).repeat_interleave(2, 1))
    assert first.amin() == 0 and first.amax() == 1
