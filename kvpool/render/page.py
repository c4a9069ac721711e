"""What all pictures share: colours for light and dark, and the frame of a page."""

from __future__ import annotations

from html import escape

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
FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'
FRAME = f"""
body {{ font: 14px {FONT}; color: var(--ink); background: var(--paper); margin: 24px auto;
  max-width: 1200px; padding: 0 16px; overflow-wrap: break-word; }}
h1 {{ font-size: 22px; }} h2 {{ font-size: 17px; margin: 32px 0 4px; }} p {{ margin: 4px 0; }}
svg {{ display: block; }}
pre {{ white-space: pre-wrap; color: var(--quiet); }}
"""


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
