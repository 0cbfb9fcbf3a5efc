"""Every key has its sentence, in the documentation and at the prompt, and both are those of the schema."""

import math
import re

import pytest

from nprf_vit.config.reference import as_help, as_page, default, sections
from nprf_vit.config.schema import FIELDS, SECTIONS
from nprf_vit.config.yaml_file import load_config, make_config
from nprf_vit.engine.output.numbers import decimals
from nprf_vit.engine.output.report import model_title
from nprf_vit.engine.tasks.classification import Classification
from tests.engine.running import ROOT, launch


def test_every_key_has_one_sentence():
    for name, item in FIELDS.items():
        sentence = item.metadata['description']
        assert sentence[-1] == '.' and '. ' not in sentence and 10 < len(sentence) < 200, (name, sentence)
    assert [item.name for _, members in sections() for item in members] == list(FIELDS)
    assert [title for title, _ in sections()] == list(SECTIONS.values())


def test_the_page_is_that_of_the_schema():
    page = (ROOT / 'docs' / 'configuration.md').read_text(encoding='utf-8')
    assert page == as_page(), 'python -m nprf_vit.config.reference > docs/configuration.md'
    assert re.findall(r'^\| `(\w+)` ', page, re.MULTILINE) == list(FIELDS)


def test_help_shows_the_same():
    shown = launch('train.py', '--help').stdout
    assert as_help() in shown
    for name, item in FIELDS.items():
        assert re.search(rf'^  {name}  \(.*{re.escape(default(item))}\)$', shown, re.MULTILINE), name


def test_defaults_read_back():
    """A default as it is written there gives the default."""
    config = make_config({'model': 'm'})
    for name, item in FIELDS.items():
        if name != 'model' and name != 'ratio':  # 4/3 has more digits than are shown
            assert make_config({'model': 'm'}, [f'{name}={default(item)}']) == config, name


@pytest.mark.parametrize(
    ('name', 'title'),
    [
        ('imagenet1k/nprf_deit_base', 'nprf_deit_base'),
        ('imagenet32/nprf_pixel_imagenet32', 'nprf_pixel_imagenet32'),
        ('digits', r'nprf_deit_tiny with patch_size=2, embed_dim=64, .*img_size=8, in_chans=1, num_classes=10'),
    ],
)
def test_the_title_names_what_was_changed(name, title):
    assert re.fullmatch(title, model_title(load_config(ROOT / 'configs' / f'{name}.yaml')))


@pytest.mark.parametrize('loss', [0.1, 9999.9, 1e5, 3.4e38, math.nan, math.inf])
def test_a_diverged_loss_keeps_its_column(loss):
    metrics = {'top1': 100.0, 'top5': 100.0, 'loss': loss, 'images': 50000}
    config = make_config({'model': 'nprf_deit_base_norpe', 'num_classes': 1000})
    header, row, _ = Classification.results_table(config, metrics).split('\n')
    assert len(header) == len(row) and row.index('50000') + 5 == len(header)
    assert len(decimals(loss)) <= 9
