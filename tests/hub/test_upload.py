"""To the Hub and back, with the Hub's cache on disk in the place of the network."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import HfApi

from nprf_vit.hub.__main__ import main

from .test_folder import DIGITS

REVISION = '0123456789abcdef0123456789abcdef01234567'


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The cache of huggingface_hub, filled by uploads as a download would fill it; returns its folder."""
    cache = tmp_path / 'cache'

    def create_repo(self, repo_id, private=False, exist_ok=False):
        (cache / f'models--{repo_id.replace("/", "--")}' / 'refs').mkdir(parents=True)
        return f'https://huggingface.co/{repo_id}'

    def upload_folder(self, repo_id, folder_path, commit_message):
        repo = cache / f'models--{repo_id.replace("/", "--")}'
        shutil.copytree(folder_path, repo / 'snapshots' / REVISION)
        (repo / 'refs' / 'main').write_text(REVISION)

    monkeypatch.setattr(HfApi, 'create_repo', create_repo)
    monkeypatch.setattr(HfApi, 'upload_folder', upload_folder)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    return cache


def test_pushed_and_loaded_by_its_name(hub, tmp_path, capsys):
    assert main([str(DIGITS), str(tmp_path / 'folder'), '--push', 'someone/digits']) == 0
    assert 'pushed to https://huggingface.co/someone/digits' in capsys.readouterr().out
    model = timm.create_model('hf-hub:someone/digits', pretrained=True, cache_dir=hub).eval()
    shipped = timm.create_model('nprf_deit_tiny.digits', pretrained=True).eval()
    image = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model(image), shipped(image), rtol=0, atol=0)
    card = (tmp_path / 'folder' / 'README.md').read_text(encoding='utf-8')
    assert '# digits\n' in card and "timm.create_model('hf-hub:someone/digits', pretrained=True)" in card


def test_a_push_that_fails_keeps_the_folder(tmp_path, monkeypatch, capsys):
    def refuse(self, *args, **kwargs):
        raise ConnectionError('no route to host')

    monkeypatch.setattr(HfApi, 'create_repo', refuse)
    assert main([str(DIGITS), str(tmp_path / 'folder'), '--push', 'someone/digits']) == 1
    error = capsys.readouterr().err
    assert error.startswith('error: cannot push to someone/digits: no route to host; ') and 'hf upload' in error
    assert timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True).num_features == 64
