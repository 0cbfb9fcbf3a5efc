import torch

from experiments import cell_borders
from nprf_vit.layers import KernelAttention


def test_quick_run_writes_a_table_and_a_picture(tmp_path, capsys):
    cell_borders.main(['--quick', '--output', str(tmp_path)])
    assert (tmp_path / 'quick_cell_borders.png').stat().st_size > 5_000
    assert (tmp_path / 'quick_cell_borders.csv').read_text().count('cells') == 6
    assert '| interpolate |' in capsys.readouterr().out


def test_the_dense_ways_are_those_of_the_package():
    """Logits of the model itself, with the bias continued by the package."""
    model, table = cell_borders.load(16)
    images = cell_borders.digits(16)[0][:4]
    found = cell_borders.ways(table, 8)
    with torch.inference_mode():
        torch.testing.assert_close(cell_borders.run(model, images, found['interpolate'])[1], model(images))
        for module in model.modules():
            if isinstance(module, KernelAttention):
                assert module.rel_pos_bias is None
        bias = model.rel_pos_bias
        bias.table, bias.grid_size, bias.extend = torch.nn.Parameter(table), (4, 4), 'cells'
        torch.testing.assert_close(cell_borders.run(model, images, found['cells'])[1], model(images))


def test_blocks_are_measured():
    steps = torch.arange(16.0)
    smooth = steps[:, None] + steps
    blocks = (steps[:, None] // 4) + (steps // 4)
    assert abs(cell_borders.border_energy(smooth[None, None]) - 1) < 1e-6
    assert cell_borders.border_energy((blocks + 0.01 * smooth)[None, None]) > 100
