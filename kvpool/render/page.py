"""What all pictures share: style sheets, and the frame of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib import resources

UNPRINTABLE = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What a page, or a file in UTF-8, cannot hold."""


def asset(name: str) -> str:
    """A style sheet or script that stands beside this module. `theme.css` has the colours, as
    custom properties of a page or of an SVG.
    """
    return resources.files("kvpool.render").joinpath(name).read_text(encoding="utf-8")


def page(title: str, *body: str, style: str = "", script: str = "") -> str:
    """A whole HTML document with a heading, which needs nothing from elsewhere."""
    styles = asset("theme.css") + asset("page.css") + style
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{styles}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        *([f"<script>\n{script}</script>"] if script else []),
        "</body>\n</html>\n",
    )
    return "\n".join(parts)


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """A list of colours and what they stand for."""
    lines = (
        f'<li><i class="swatch" style="background:{colour}"></i>{text(words)}</li>'
        for colour, words in keys
    )
    return f'<ul class="legend">{"".join(lines)}</ul>'


def text(words: str) -> str:
    """Words as text of a page."""
    return escape(UNPRINTABLE.sub("\ufffd", words))
