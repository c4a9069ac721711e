"""What all pictures share: colours for light and dark, and the frame of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from xml.etree.ElementTree import Element, SubElement

THEME = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2127; --quiet: #5f6670;
  --line: #d5d9de; --bare: #e9ebee; --stripe: #aab0b8; --found: #d0021b;
  --seam: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e3e6ea; --quiet: #9aa2ad;
    --line: #353b43; --bare: #23282e; --stripe: #4d5560; --found: #ff5c6c;
    --seam: rgb(21 24 28 / 40%); }
}
"""
"""Custom properties of a style sheet: of a page, or of an SVG that is a file of its own."""
UNPRINTABLE = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What a page, or a file in UTF-8, cannot hold."""
FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'
FRAME = f"""
body {{ font: 14px {FONT}; color: var(--ink); background: var(--paper); margin: 24px auto;
  max-width: 1200px; padding: 0 16px; overflow-wrap: break-word; }}
h1 {{ font-size: 22px; }} h2 {{ font-size: 17px; margin: 32px 0 4px; }} p {{ margin: 4px 0; }}
svg {{ display: block; }}
pre {{ white-space: pre-wrap; color: var(--quiet); }}
"""

TABLE = """
:root { --passed: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --passed: #57ab5a; } }
table { border-collapse: collapse; width: 100%; margin: 6px 0; }
tr { border-bottom: 1px solid var(--line); }
td { vertical-align: top; padding: 3px 12px 3px 0; }
.number { text-align: right; padding: 3px 0 3px 12px; font-variant-numeric: tabular-nums; }
.state, .number { white-space: nowrap; }
.counts { width: auto; }
.sentence { width: 60%; overflow-wrap: anywhere; }
.passed { color: var(--passed); } .quiet, .not-here { color: var(--quiet); }
.failed { color: var(--found); font-weight: 600; }
@media (max-width: 700px) {
  .rows tr, .rows td:first-child { display: block; } .rows tr { padding: 5px 0; }
  .rows td { display: inline; padding: 0 8px 0 0; } .rows td:first-child { font-weight: 600; }
}
"""
"""Style of pages of results: classes of tables and of their cells."""
Cell = tuple[str, str]
"""Words, and the class that they are shown as."""


def page(title: str, *body: str, style: str = "", script: str = "") -> str:
    """A whole HTML document with a heading, which needs nothing from elsewhere."""
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{THEME}{FRAME}{style}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        *([f"<script>\n{script}</script>"] if script else []),
        "</body>\n</html>\n",
    )
    return "\n".join(parts)


def table(lines: Iterable[Iterable[Cell]], kind: str = "") -> str:
    """A table of class `kind`."""
    rows = (
        "".join(f'<td class="{shown}">{text(words)}</td>' for words, shown in line)
        for line in lines
    )
    written = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<table class="{kind}">\n{written}</table>'


def text(words: str) -> str:
    """Words as text of a page."""
    return escape(printable(words))


def printable(words: str) -> str:
    """Words without characters that no page can hold."""
    return UNPRINTABLE.sub("\ufffd", words)


def add(parent: Element, tag: str, text: str = "", /, **attributes: object) -> Element:
    """A new child; `text_anchor=` and `class_=` are attributes `text-anchor` and `class`."""
    written = {
        name.rstrip("_").replace("_", "-"): f"{value:.3f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
    }
    child = SubElement(parent, tag, written)
    child.text = text
    return child
