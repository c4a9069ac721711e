"""What `make docs` adds to these pages: the first one and README.md, pictures, the programs of
examples/, the order of the reference's members, links that leave this folder as plain text, and a
copy of Mermaid for pages with diagrams.
"""

import re
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent))
from order import ORDER
from pictures import FOLDER, LANDING, draw, figure, with_pictures

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
PROGRAM = re.compile(r"^- \[`(\w+\.py)`\]\(\.\./examples/\1\)(.*)$", re.M)
MEMBERS = re.compile(r"^::: ([\w.]+)\n(?:    options:\n)?", re.M)
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
    files.append(File.generated(config, "overview.md", content=moved))
    files.append(File.generated(config, "index.md", content=_landing(moved)))
    files.append(File.generated(config, MERMAID, abs_src_path=str(_mermaid())))
    try:
        pictures = draw(ROOT / "build" / FOLDER)
    except RuntimeError as error:
        raise PluginError(str(error)) from None
    for path in pictures:
        files.append(File.generated(config, f"{FOLDER}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    name = page.file.src_uri
    if name == "examples.md":
        markdown = PROGRAM.sub(_shown, markdown)
    if "/" in name:  # there ../ is this folder
        return MEMBERS.sub(_ordered, markdown)
    if name != "index.md":
        markdown = with_pictures(name, markdown)
    return OUTSIDE.sub(_plain, markdown.replace("](../README.md", "](overview.md"))


def _landing(readme):
    """README's first sentence and doors, with a picture and ten lines of code between them."""
    sentence = readme.split("\n\n")[1]
    doors = re.findall(
        r"^- .+$", readme.partition("\n## Four doors\n")[2].partition("\n## ")[0], re.M
    )
    code = (ROOT / "docs" / "landing.py").read_text()
    cards = "\n".join(f"{door.rstrip('.:')}." for door in doors)
    parts = (
        "---\nhide: [navigation, toc]\n---\n\n# kvpool",
        sentence,
        figure(LANDING),
        f"```python\n{code}```",
        f'<div class="grid cards" markdown>\n\n{cards}\n\n</div>',
        "[What works, what does not yet, and two commands that show it](overview.md)",
    )
    return "\n\n".join(parts) + "\n"


def _ordered(entry):
    names = ORDER.get(entry[1])
    if names is None:
        return entry[0]
    return f"::: {entry[1]}\n    options:\n      members: [{', '.join(names.split())}]\n"


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
