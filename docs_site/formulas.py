r"""Formulas at build time: TeX between dollar signs becomes a drawing, e^{x} and z_i in sentences become scripts.

Nothing has to be loaded by the reader's browser: no script, no font. A drawing comes from ziamath, which has the STIX
font inside, out of MathML by latex2mathml.
"""

import html
import re
from collections.abc import Callable

CODE = re.compile(r'(^ *```.*?^ *```|`+[^`]+`+|<!--.*?-->)', re.MULTILINE | re.DOTALL)
DISPLAY = re.compile(r'^\$\$(.*?)\$\$[ ]*$', re.MULTILINE | re.DOTALL)
INLINE = re.compile(r'(?<![\w\\$])\$(?=\S)([^$\n]+?)(?<=\S)\$(?![\w$])')
# bars and hats: the drawer stretches them over whatever stands beside them
STRETCHED = re.compile(r'<mo[^>]*>(&#x02016;|&#x0005E;)</mo>')
SIZE = 19  # pixels, beside text of 16

BRACED = re.compile(r'(?P<sign>[_^])\{(?P<text>(?:[^{}<>]|</?su[bp]>|<(?!/))*)\}')
POWER = re.compile(r'(?<=\w)\^(-?\d+(?:\.\d+)?|[a-z]{1,2})(?![A-Za-z0-9])')
# one letter, perhaps with an accent or dδφ before it, and one or two small letters or a word: z_i, φk_jr, Â_j, c_min;
# not the parts of a name
_BASE, _INDEX = r"[dδ∂]?φ?\w['\u0300-\u036f]?|num|den|out|log|\]", r'min|max|far|all|cell|[a-zα-ωΩ]{1,2}|\d'
LETTERS = re.compile(rf'((?<=</sup>)|(?<![A-Za-z0-9_.`])(?:{_BASE}))_({_INDEX})(?![A-Za-z0-9_`])')


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything changed but code and comments."""
    return ''.join(part if i % 2 else change(part) for i, part in enumerate(CODE.split(text)))


def draw_formulas(text: str) -> str:
    """Markdown with its formulas as drawings."""
    return outside_code(text, _draw)


def _draw(text: str) -> str:
    text = DISPLAY.sub(lambda m: f'\n<div class="formula" markdown="0">{drawing(m[1])}</div>\n', text)
    text = INLINE.sub(lambda m: f'<span class="formula-inline">{drawing(m[1], inline=True)}</span>', text)
    parts = re.split(
        r'(<svg.*?</svg>|\]\([^)\s]*\)|</?[a-z]+(?:\s[^>]*)?>)', text, flags=re.DOTALL
    )  # neither drawings nor links
    return ''.join(part if i % 2 else scripts(part) for i, part in enumerate(parts))


def drawing(tex: str, inline: bool = False) -> str:
    """A formula as SVG, read out by its TeX.

    Raises:
        ValueError: If the TeX cannot be read.
    """
    import ziamath
    from latex2mathml.converter import convert

    tex = ' '.join(tex.split())
    ziamath.config.svg2 = False  # paths of their own: symbols would be known by the same names in every drawing
    ziamath.config.precision = 2
    try:
        mathml = convert(tex, display='inline' if inline else 'block')
        svg = ziamath.Math(STRETCHED.sub(r'<mo stretchy="false">\1</mo>', mathml), size=SIZE).svg()
    except Exception as error:
        raise ValueError(f'cannot draw the formula {tex}: {type(error).__name__}: {error}') from error
    svg = svg.replace('="black"', '="currentColor"')
    return svg.replace('<svg ', f'<svg role="img" aria-label="{html.escape(tex)}" ', 1)


def scripts(text: str) -> str:
    """Sub- and superscripts, innermost braces first."""
    text = POWER.sub(r'<sup>\1</sup>', text)
    text = LETTERS.sub(r'\1<sub>\2</sub>', text)
    before = ''
    while text != before:
        before, text = text, BRACED.sub(_script, text)
    return text


def _script(match: re.Match) -> str:
    tag = 'sub' if match['sign'] == '_' else 'sup'
    text = re.sub(r'<(?!/?su[bp]>)', '&lt;', match['text'])
    return f'<{tag}>{text}</{tag}>'
