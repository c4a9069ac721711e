"""What `make docs` adds to these pages: README.md as the first one, the programs of examples/,
links that leave this folder as plain text, and a copy of Mermaid for pages with diagrams.
"""

import re
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
PROGRAM = re.compile(r"^- \[`(\w+\.py)`\]\(\.\./examples/\1\)(.*)$", re.M)
# the theme would load Mermaid from a CDN; the package mermaidx contains mermaid.min.js of Mermaid's
# own release 11.16.0, which this is the hash of
MERMAID, MERMAID_PAGE = "assets/mermaid.min.js", '<pre class="mermaid">'
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"


def on_files(files, config):
    readme = (ROOT / "README.md").read_text()
    # there links begin at the root, here in this folder
    moved = re.sub(
        r"\]\((?!https?:|#)(docs/)?([^)]+)\)",
        lambda link: f"]({'' if link[1] else '../'}{link[2]})",
        readme,
    )
    files.append(File.generated(config, "index.md", content=moved))
    files.append(File.generated(config, MERMAID, abs_src_path=str(_mermaid())))
    return files


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri == "examples.md":
        markdown = PROGRAM.sub(_shown, markdown)
    if "/" in page.file.src_uri:  # there ../ is this folder
        return markdown
    return OUTSIDE.sub(_plain, markdown.replace("](../README.md", "](index.md"))


def on_page_content(html, page, **_):
    if MERMAID_PAGE not in html:
        return html
    return f'{html}\n<script src="{get_relative_url(MERMAID, page.url)}"></script>'


def _mermaid():
    package = find_spec("mermaidx")
    script = package and Path(package.origin).with_name("assets") / "mermaid.js"
    if not script or sha256(script.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise PluginError("Mermaid 11.16.0 is not here: pip install -r docs/requirements.txt")
    return script


def _shown(program):
    code = (ROOT / "examples" / program[1]).read_text()
    about = program[2].removeprefix(": ")
    return f"## {program[1]}\n\n{about[:1].upper()}{about[1:]}\n\n```python\n{code}```\n"


def _plain(link):
    if not (ROOT / link[2]).exists():
        raise FileNotFoundError(f"{link[0]}: {ROOT / link[2]}")
    return link[1]
