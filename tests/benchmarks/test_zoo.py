"""The zoo table counts what a model has."""

import timm

from benchmarks import zoo
from nprf_vit.engine.output.csv_file import read_rows


def test_quick_run_writes_the_tiny_models(tmp_path, capsys):
    zoo.main(['--quick', '--output', str(tmp_path)])
    (row,) = read_rows(tmp_path / 'quick_zoo.csv')
    assert row['entry point'] == 'nprf_deit_tiny'
    model = timm.create_model('nprf_deit_tiny')
    assert row['parameters, M'] == f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f}'
    # 12 blocks of 196 tokens, width 192, 3 heads, head dim 64, 32 features: projections, attention with bias, features
    blocks = 12 * 196 * (12 * 192**2 + 3 * (196 * (32 + 64 + 1) + 2 * 32 * 64))
    ends = 196 * 192 * 3 * 16**2 + 192 * 1000
    assert row['GMACs at 224 px'] == f'{(blocks + ends) / 1e9:.2f}'
    assert 'nprf_deit_tiny' in capsys.readouterr().out
