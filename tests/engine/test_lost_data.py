"""Data folders that may not be read."""

import pytest

import train as command
from nprf_vit.config.yaml_file import make_config
from nprf_vit.data.datasets.images import open_source
from nprf_vit.data.datasets.pixels import open_pixels
from nprf_vit.errors import Exit, InputError

from ..data.folders import digit_folder
from .running import as_nobody, config_file, in_child, open_to_all


@pytest.fixture
def data(scans, tmp_path):
    root = digit_folder(tmp_path / 'data', train=40, val=10)
    return root, {**scans, 'data_dir': str(root), 'aug_repeats': 1}


# a folder that may be entered and not listed serves, if the folders in it may be listed
@pytest.mark.parametrize(
    ('forbidden', 'mode'), [('', 0o000), ('', 0o444), ('train', 0o000), ('val', 0o111), ('train/digit2', 0o000)]
)
def test_a_folder_without_permission_is_told_in_one_line(data, tmp_path, capfd, forbidden, mode):
    root, keys = data
    file = config_file(tmp_path, **keys)
    open_to_all(tmp_path)
    tmp_path.chmod(0o777)
    (root / forbidden).chmod(mode)
    code = in_child(as_nobody(lambda: command.main(['--config', str(file), '--output', str(tmp_path / 'out')])))
    (root / forbidden).chmod(0o755)
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == Exit.INPUT, lines[-6:]
    assert len(lines) == 1 and lines[0].startswith('error: ') and 'Permission denied' in lines[0]


PIXEL = {'task': 'pixel', 'model': 'nprf_pixel_imagenet32', 'eval_metric': 'bpd'}
IMAGES = {'model': 'nprf_deit_tiny', 'num_classes': 10}


@pytest.mark.parametrize(
    ('open_split', 'keys'),
    [
        (open_source, {**IMAGES, 'dataset': 'torch/image_folder'}),
        (open_pixels, {**PIXEL, 'dataset': 'imagenet32_chrabaszcz'}),
        (open_pixels, {**PIXEL, 'dataset': 'imagenet32_vandenoord'}),
    ],
)
@pytest.mark.parametrize('forbidden', ['', 'data'])
def test_named_datasets_without_permission_are_refused(tmp_path, open_split, keys, forbidden):
    (tmp_path / 'data' / 'below').mkdir(parents=True)
    open_to_all(tmp_path)
    config = make_config({**keys, 'data_dir': str(tmp_path / 'data')})
    (tmp_path / forbidden).chmod(0o000)

    def work():
        with pytest.raises(InputError, match='Permission denied'):
            open_split(config, 'train')

    code = in_child(as_nobody(work))
    (tmp_path / forbidden).chmod(0o755)
    assert code == 0
