"""Images inside a page, so that nothing in them runs: a browser runs no script of what an `<img>` shows.

The page forbids the rest itself: it may load nothing, run nothing and send nothing anywhere.
"""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of a page."""
TYPES = {"png": "image/png", "svg": "image/svg+xml"}


def picture(content: bytes, kind: str, *, alt: str = "", width: int | None = None) -> str:
    """An `<img>` that holds its picture.

    Args:
        kind: a key of `TYPES`.
        width: the width in pixels; None: as wide as what it stands in.
    """
    base64_text = base64.b64encode(content).decode("ascii")
    size = "" if width is None else f' width="{width}"'
    return f'<img alt="{html.escape(alt)}"{size} src="data:{TYPES[kind]};base64,{base64_text}">'


def svg_of(figure: Figure, *, alt: str = "") -> str:
    """A figure as an `<img>`; unless `alt` is given, the titles of its axes stand for it."""
    alt = alt or "; ".join(axes.get_title() for axes in figure.axes if axes.get_title())
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return picture(drawn.getvalue(), "svg", alt=alt)
