"""What a user may get wrong: one clear message each, exit code 2, and nothing overwritten."""

import pytest
import torch
from safetensors.torch import save_file

from nprf_vit.engine.build import build_training
from nprf_vit.engine.distributed.process_group import process_group
from nprf_vit.engine.train import train
from nprf_vit.engine.validate import validate
from nprf_vit.errors import InputError

from ..data.folders import digit_folder
from .running import ONE, config_file, launch, run_here, small_config


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp('finished')
    run_here(folder, epochs=1, warmup_epochs=0)
    return folder


ONE_EPOCH = {'epochs': 1, 'warmup_epochs': 0}


def test_output_folder_that_holds_a_run(finished):
    before = (finished / 'last.pt').read_bytes()
    with pytest.raises(InputError, match='holds a run already: continue it with --resume auto'):
        run_here(finished, **ONE_EPOCH)
    assert (finished / 'last.pt').read_bytes() == before


@pytest.mark.parametrize('resume', [None, 'auto'])
def test_output_folder_of_a_different_config(finished, resume):
    message = r'belongs to a different configuration \(lr: 0.001 there, 0.002 here\)'
    with pytest.raises(InputError, match=message):
        run_here(finished, resume=resume, **ONE_EPOCH, lr=2e-3)


def test_resume_from_a_file_of_another_config(finished, tmp_path):
    with pytest.raises(InputError, match='belongs to another configuration: lr'):
        run_here(tmp_path / 'new', resume=str(finished / 'last.pt'), **ONE_EPOCH, lr=2e-3)
    with pytest.raises(InputError, match='no checkpoint file'):
        run_here(tmp_path / 'new', resume='nowhere.pt', **ONE_EPOCH)
    with pytest.raises(InputError, match='no checkpoint file .*: it is a folder, give a file in it such as last.pt'):
        run_here(tmp_path / 'new', resume=str(finished), **ONE_EPOCH)
    with pytest.raises(InputError, match='holds weights only: resume from last.pt'):
        run_here(tmp_path / 'new', resume=str(finished / 'best.pt'), **ONE_EPOCH)
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('target', ['.', 'no/x.json'])
def test_results_that_could_not_be_written_are_refused_before_the_work(finished, tmp_path, target):
    with pytest.raises(InputError, match='expected a file in a folder that exists'):
        validate(small_config(), ONE, str(finished / 'nothing.pt'), str(tmp_path / target))


@pytest.mark.parametrize('content', [b'', b'PK\x03\x04 cut off', b'not a checkpoint'])
def test_resume_from_a_damaged_file(tmp_path, content):
    (tmp_path / 'last.pt').write_bytes(content)
    with pytest.raises(InputError, match='cannot read checkpoint'):
        run_here(tmp_path, resume='auto')


@pytest.mark.parametrize('length', [0, 5, 300, 5000])
def test_published_weights_that_were_cut(tmp_path, length):
    whole, file = tmp_path / 'whole.safetensors', tmp_path / 'cut.safetensors'
    save_file({'weight': torch.zeros(2000)}, whole)
    file.write_bytes(whole.read_bytes()[:length])
    with pytest.raises(InputError, match='cannot read checkpoint .*cut.safetensors'):
        validate(small_config(), ONE, str(file))


def test_resume_from_a_foreign_file(tmp_path):
    torch.save({'weights': torch.zeros(3)}, tmp_path / 'last.pt')
    with pytest.raises(InputError, match='is no checkpoint of this package'):
        run_here(tmp_path, resume='auto')


def test_checkpoint_that_would_execute_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ('executed',)

    torch.save({'format': 1, 'trap': Trap()}, tmp_path / 'last.pt')
    with pytest.raises(InputError, match='cannot read checkpoint'):
        run_here(tmp_path, resume='auto')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model': 'nprf_diet_tiny'}, 'unknown model nprf_diet_tiny: near are nprf_deit_tiny'),
        ({'model': 'nosuch'}, r'unknown model nosuch: see timm.list_models\(\)'),
        ({'pretrained': True}, 'no weights are published for nprf_deit_tiny: give --checkpoint FILE'),
        ({'model_kwargs': {'patch_size': 2, 'featuredim': 3}}, r'did you mean feature_dim\?'),
        ({'model_kwargs': {'patch_size': 2, 'feature_dim': 0}}, 'feature_dim 0: expected a whole number above 0'),
        ({'dataset': 'digit'}, 'unknown dataset digit: expected digits, torch/cifar10, a name that begins with torch/'),
        ({'model_kwargs': {'patch_size': 2, 'widht': 3}}, 'cannot build model nprf_deit_tiny: .*widht'),
        ({'img_size': 9}, 'cannot build model nprf_deit_tiny: .*9'),
        ({'lr': None}, 'the key lr is missing'),
        ({'opt': 'adamm'}, 'cannot build optimizer adamm'),
        ({'num_classes': 11}, 'digits train has 10 classes, the configuration num_classes 11'),
        ({'global_batch': 2048}, 'the training set has 1437 images, fewer than global_batch 2048'),
        ({'mixup_block': 24, 'batch_size': 32}, 'whole mixing blocks of 24'),
        ({'in_chans': 3, 'mean': None, 'std': [1, 1, 1], 'dataset': '', 'data_dir': 'no/where'}, 'does not exist'),
    ],
)
def test_values_that_cannot_be_built(changes, message):
    with pytest.raises(InputError, match=message):
        build_training(small_config(**changes), ONE)


def test_world_size_that_does_not_divide_the_batch(tmp_path):
    file = config_file(tmp_path, global_batch=125, mixup=0.0, cutmix=0.0)
    done = launch('train.py', '--config', file, '--output', tmp_path / 'out', processes=2, expect=1)
    assert 'error: world size 2 does not divide global_batch 125: use 1, 5' in done.stderr
    assert not (tmp_path / 'out').exists()


def test_command_line_speaks_in_one_line(tmp_path):
    file = config_file(tmp_path, dataset='', in_chans=1)
    done = launch('train.py', '--config', file, '--data-dir', tmp_path / 'none', expect=2)
    assert done.stderr.strip() == f'error: the data folder {tmp_path / "none"} does not exist'
    file.write_text('model: nprf_deit_tiny\nlearning_rate: 1\n', encoding='utf-8')
    done = launch('validate.py', '--config', file, expect=2)
    assert done.stderr.startswith(f'error: {file}:2: unknown key learning_rate; the nearest valid key is')


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('', encoding='utf-8')
    with pytest.raises(InputError, match='is a file'):
        run_here(tmp_path / 'file')
    with pytest.raises(InputError, match='cannot write to the output folder'):
        run_here(tmp_path / 'file' / 'below')


def test_folder_classes_and_model_must_agree(tmp_path):
    root = digit_folder(tmp_path / 'data')
    with pytest.raises(InputError, match='has 4 classes, the model 1000: set num_classes'):
        train(small_config(dataset='', data_dir=str(root), num_classes=None), ONE, tmp_path / 'out')


def test_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip('this machine has CUDA')
    with pytest.raises(InputError, match='torch sees no CUDA device'), process_group('cuda'):
        pass
