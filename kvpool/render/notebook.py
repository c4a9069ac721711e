"""`%load_ext kvpool.render.notebook`: notebooks of IPython show layouts and pools with memory maps,
not only as tables.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from kvpool.layout import PoolLayout
from kvpool.pools.base import KVPool
from kvpool.render.page import text
from kvpool.render.svg import svg


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext` with IPython's shell."""
    html = shell.display_formatter.formatters["text/html"]
    html.for_type(PoolLayout, lambda layout: with_map(layout, repr(layout)))
    html.for_type(KVPool, lambda pool: with_map(pool.layout, repr(pool)))


def with_map(layout: PoolLayout, title: str) -> str:
    """The table of a layout, and the map of an item of each kind: an image, since the style of an
    SVG inside the page would be that of the whole notebook.
    """
    encoded = b64encode(svg(layout, title).encode()).decode()
    image = f'<img alt="{text(title)}" src="data:image/svg+xml;base64,{encoded}">'
    return layout._repr_html_() + image
