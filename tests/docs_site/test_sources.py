"""What the site is made of, without building it: links, formulas, the list of pages, the names of the reference."""

import re
from pathlib import Path

import pytest

from docs_site.api_pages import ROOMS, api_pages, entry_points, public_names
from docs_site.formulas import draw_formulas, scripts
from docs_site.repository import ROOT, find_links, relink, site_path

CONFIG = (ROOT / 'mkdocs.yml').read_text(encoding='utf-8')
FROZEN = (ROOT / 'tests' / 'public_api.txt').read_text(encoding='utf-8')


@pytest.mark.parametrize(
    ('source', 'link', 'expected'),
    [
        ('README.md', 'docs/math.md#features', 'math.md#features'),
        ('README.md', 'docs/results/models.png', 'results/models.png'),
        ('README.md', 'docs/results', 'results/index.md'),
        ('README.md', 'CHANGELOG.md', 'changelog.md'),
        ('docs/extending.md', '../CONTRIBUTING.md', 'contributing.md'),
        ('docs/faq.md', '../README.md#model-zoo', 'overview.md#model-zoo'),
        ('docs/your_own_images.md', '../configs/own_images.yaml', 'files/configs/own_images.yaml'),
        ('docs/math.md', '#direct', '#direct'),
        ('docs/math.md', 'https://example.org/a.md', 'https://example.org/a.md'),
        ('docs/math.md', 'nowhere.md', 'nowhere.md'),  # left to mkdocs, which complains
    ],
)
def test_links_lead_to_the_same_file(source, link, expected):
    assert relink(f'see [this]({link}), `[code]({link})`', source) == f'see [this]({expected}), `[code]({link})`'


def test_files_and_folders_that_are_linked_come_along():
    links = find_links({'docs/a.md': '[x](../configs/digits.yaml) [y](results/) [z](math.md) [s](../slurm/)'})
    assert links.folders == {'docs/results', 'slurm'}
    assert {'configs/digits.yaml', 'slurm/train_1node.sbatch'} <= links.files
    assert site_path('slurm') == 'files/slurm/index.md'


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('c_{j-i}', 'c<sub>j-i</sub>'),
        ('e^{b_{j-i}}', 'e<sup>b<sub>j-i</sub></sup>'),
        ('z_i = num_i/den_i', 'z<sub>i</sub> = num<sub>i</sub>/den<sub>i</sub>'),
        ('φk_jr, Â_j, c_δ', 'φk<sub>jr</sub>, Â<sub>j</sub>, c<sub>δ</sub>'),
        ('E[x_j²], A_j(1+x_j), G_iᵀ', 'E[x<sub>j</sub>²], A<sub>j</sub>(1+x<sub>j</sub>), G<sub>i</sub>ᵀ'),
        ('εκ/c_min Σ_{j<i} dA_ij', 'εκ/c<sub>min</sub> Σ<sub>j&lt;i</sub> dA<sub>ij</sub>'),
        ('b^pp_pq, n^1.36', 'b<sup>pp</sup><sub>pq</sub>, n<sup>1.36</sup>'),
        ('κ_{(-dy) mod P,\n(-dx) mod Q}', 'κ<sub>(-dy) mod P,\n(-dx) mod Q</sub>'),
        ('sm_80, FFT_POINT, ema_top1, key_mask, nprf_vit.ops, rel_pos_size and a_function(x)', None),
    ],
)
def test_scripts(text, expected):
    assert scripts(text) == (expected or text)


def test_code_and_addresses_keep_their_signs():
    text = '`c_{j-i}` and [x](a_i.md)\n\n```\nz_i $$ x $$\n```\n'
    assert draw_formulas(text) == text


def test_formulas_are_drawn():
    pytest.importorskip('ziamath')
    drawn = draw_formulas('a\n\n$$ \\lVert q \\rVert = \\frac{1}{2} $$\n\nand $x^2$ costs $5')
    assert drawn.count('<svg role="img" aria-label="') == 2 and drawn.endswith('costs $5') and 'black' not in drawn
    # bars that stretched over the whole page once
    assert all(float(height) < 80 for height in re.findall(r'height="([\d.]+)"', drawn))
    with pytest.raises(ValueError, match='cannot draw the formula'):
        draw_formulas('$$ \\frac{1} $$\n')


def test_pages_that_are_listed_exist():
    listed = re.findall(r': (\w+\.md)$', CONFIG, re.MULTILINE)
    mounted = {'overview.md', 'contributing.md', 'changelog.md'}
    assert [name for name in listed if not (ROOT / 'docs' / name).is_file() and name not in mounted] == []
    assert len(listed) == len(set(listed)) and 'faq.md' in listed


def test_nothing_is_named_that_would_be_loaded_from_elsewhere():
    ours = [CONFIG, *(path.read_text(encoding='utf-8') for path in Path(ROOT, 'docs_site').iterdir() if path.is_file())]
    assert not [text for text in ours if re.search(r'https?://(?!www\.w3\.org)', text)]


def test_the_reference_has_every_public_name():
    directives = {name for text in api_pages().values() for name in re.findall(r'^::: (\S+)$', text, re.MULTILINE)}
    frozen = set(
        re.findall(r'^((?:nprf_vit|nprf_vit\.ops|nprf_vit\.layers)\.[A-Za-z]\w*)(?:\(|: (?!module))', FROZEN, re.M)
    )
    assert frozen - directives == set() and len(frozen) > 15
    assert {'KernelVisionTransformer', 'PixelTransformer'} <= set(public_names('nprf_vit.models'))
    assert 'nprf_deit_base' in entry_points('nprf_vit/models/nprf_deit.py') and len(ROOMS) == len(api_pages())
