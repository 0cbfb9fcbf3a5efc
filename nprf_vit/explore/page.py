"""From models and images to one HTML file."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from nprf_vit.html_page.build import build_page, picture_url

from .biases import biases_of
from .loading import Loaded
from .pictures import Picture, class_names
from .pixel_view import pixel_grid, pixel_view
from .views import Grid, choose_strides, describe, grid_of, matrices_of, view_of_image

FOLDER = Path(__file__).parent
SCRIPTS = ('rows.js', 'panel.js', 'bias.js', 'explore.js')


def explore_page(models: list[Loaded], sized: list[list[Loaded]], pictures: list[Picture], megabytes: float) -> str:
    """Args:
    models: What is compared, one or two of them.
    sized: Each of these at the sizes that are shown side by side.
    megabytes: About what the rows may take.
    """
    shown = [(i, loaded) for i, sizes in enumerate(sized) for loaded in sizes]
    grids = [pixel_grid(one.model) if one.is_pixel else grid_of(one.model) for _, one in shown]
    costs = [(matrices_of(one.model), grid) for (_, one), grid in zip(shown, grids)]
    strides = choose_strides(costs, int(megabytes * 1e6 / len(pictures)))
    grids = [dataclasses.replace(grid, stride=stride) for grid, stride in zip(grids, strides)]
    data = {
        'models': [{'name': one.name, 'title': one.title, 'biases': biases_of(one.model)} for one in models],
        'images': [{'name': picture.name, 'thumbnail': _thumbnail(models[0], picture)} for picture in pictures],
        'views': [_view(loaded, grid, i, pictures) for (i, loaded), grid in zip(shown, grids)],
        'pixel': models[0].is_pixel,
    }
    scripts = [FOLDER / name for name in SCRIPTS]
    title = f'Attention of {" and ".join(one.name for one in models)}'
    return build_page(title, FOLDER / 'explore.html', [FOLDER / 'explore.css'], scripts, data)


def _view(loaded: Loaded, grid: Grid, model_index: int, pictures: list[Picture]) -> dict[str, Any]:
    if loaded.is_pixel:
        images = [pixel_view(loaded.model, grid, picture.content) for picture in pictures]
    else:
        names = class_names(loaded.config, loaded.model.num_classes)
        images = [view_of_image(loaded, grid, picture, names) for picture in pictures]
    return describe(grid, loaded, model_index) | {'images': images}


def _thumbnail(loaded: Loaded, picture: Picture) -> str:
    if loaded.is_pixel:
        levels = picture.content.double() * (255 / (loaded.model.levels - 1))
        return picture_url(levels.round().permute(1, 2, 0).numpy().astype(np.uint8))
    small = picture.content.copy()
    small.thumbnail((64, 64))
    return picture_url(np.asarray(small).reshape(small.height, small.width, -1))
