"""What is installed works without the checkout: commands, py.typed, every folder of the package."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import nprf_vit
from nprf_vit.engine.output import provenance

ROOT = Path(nprf_vit.__file__).parents[1]
PRETRAINED = "import timm, nprf_vit; timm.create_model('nprf_deit_tiny.digits', pretrained=True); print('loaded')"


def test_scripts_of_the_checkout_are_the_installed_commands():
    project = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    scripts = dict(re.findall(r'^(nprf-\w+) = "(.*)"$', project, re.MULTILINE))
    assert set(scripts) == {'nprf-train', 'nprf-validate'}
    for name, target in scripts.items():
        module, function = target.split(':')
        assert callable(getattr(import_module(module), function))
        script = (ROOT / f'{name.removeprefix("nprf-")}.py').read_text(encoding='utf-8')
        assert f'from {module} import main, {function}' in script


def test_commit_is_that_of_this_project_only(tmp_path, monkeypatch):
    """A package installed inside somebody's repository is not of that repository's commit."""
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    file = tmp_path / 'venv' / 'provenance.py'
    file.parent.mkdir()
    file.touch()
    git = ['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b.example']
    subprocess.run([*git, 'commit', '-qm', 'theirs', '--allow-empty'], check=True)
    monkeypatch.setattr(provenance, '__file__', str(file))
    assert provenance.commit() is None
    subprocess.run([*git, 'add', '.'], check=True)
    subprocess.run([*git, 'commit', '-qm', 'ours'], check=True)
    assert len(provenance.commit()) == 40


@pytest.mark.slow
def test_the_wheel_runs_outside_the_checkout(tmp_path):
    """Builds with the setuptools at hand: no network."""
    pytest.importorskip('build')
    source = tmp_path / 'source'
    for name in ('nprf_vit', 'pyproject.toml', 'README.md', 'LICENSE'):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    build = [sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if name.startswith('nprf_vit/')}
        archive.extractall(tmp_path / 'site')
    package = {'nprf_vit/py.typed'}
    for ending in ('py', 'css', 'html', 'js', 'safetensors'):
        package |= {str(file.relative_to(ROOT)) for file in (ROOT / 'nprf_vit').rglob(f'*.{ending}')}
    assert files == package
    for command, shown in (
        (('-m', 'nprf_vit.train', '--help'), 'configuration keys'),
        (('-m', 'nprf_vit.validate', '--help'), '--checkpoint'),
        (('-m', 'nprf_vit.doctor', '--help'), '--seconds'),
        (('-m', 'nprf_vit.explore', '--help'), '--img-size'),
        (('-m', 'nprf_vit.report', '--help'), 'RUN'),
        (('-m', 'nprf_vit.hub', '--help'), '--push'),
        (('-c', PRETRAINED), 'loaded'),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={'PYTHONPATH': str(tmp_path / 'site'), 'PATH': ''},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown in done.stdout
