"""One HTML file that needs nothing else: styles, scripts and data inside, no network, opened from disk."""

import base64
import html
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent
LARGEST_PICTURE = 512  # pixels: what a panel of the page shows at most
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{styles}
</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>
'use strict';
{scripts}
</script>
</body>
</html>
"""


def build_page(title: str, body: Path, styles: Sequence[Path], scripts: Sequence[Path], data: Any) -> str:
    """The page, with the styles and scripts that all pages share before its own.

    Args:
        body: File with what stands in the body.
        data: What the scripts find by `readData()`: anything that JSON takes.
    """
    parts = {
        'styles': [FOLDER / 'page.css', *styles],
        'scripts': [FOLDER / 'page.js', FOLDER / 'chart.js', *scripts],
    }
    texts = {name: '\n'.join(file.read_text(encoding='utf-8') for file in files) for name, files in parts.items()}
    # a name of a class or file may hold '</script>': no '<' reaches the page
    plain = json.dumps(data, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
    return _PAGE.format(
        policy=_POLICY, title=html.escape(title), body=body.read_text(encoding='utf-8'), data=plain, **texts
    )


def pack(values: np.ndarray) -> str:
    """Numbers as text, which `unpack` in page.js turns back into bytes: deflated, then base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode('ascii')


def picture_url(pixels: np.ndarray) -> str:
    """An (H, W, C) uint8 picture as a data URL: small ones without loss, photographs as JPEG."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    small = max(image.size) <= 64
    image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE))
    stream = io.BytesIO()
    image.save(stream, 'PNG' if small else 'JPEG', **({'optimize': True} if small else {'quality': 88}))
    kind = 'png' if small else 'jpeg'
    return f'data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode("ascii")}'


def size_of(page: str) -> str:
    """Of the file, in words."""
    size = len(page.encode())
    return f'{size / 1e6:.1f} MB' if size >= 1e6 else f'{size / 1e3:.0f} kB'
