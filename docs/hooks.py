"""What `make docs` adds to these pages: README.md as the first one, the programs of examples/, and
links that leave this folder as plain text.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
PROGRAM = re.compile(r"^- \[`(\w+\.py)`\]\(\.\./examples/\1\)(.*)$", re.M)


def on_files(files, config):
    readme = (ROOT / "README.md").read_text()
    # there links begin at the root, here in this folder
    moved = re.sub(
        r"\]\((?!https?:|#)(docs/)?([^)]+)\)",
        lambda link: f"]({'' if link[1] else '../'}{link[2]})",
        readme,
    )
    files.append(File.generated(config, "index.md", content=moved))
    return files


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri == "examples.md":
        markdown = PROGRAM.sub(_shown, markdown)
    if "/" in page.file.src_uri:  # there ../ is this folder
        return markdown
    return OUTSIDE.sub(_plain, markdown.replace("](../README.md", "](index.md"))


def _shown(program):
    code = (ROOT / "examples" / program[1]).read_text()
    about = program[2].removeprefix(": ")
    return f"## {program[1]}\n\n{about[:1].upper()}{about[1:]}\n\n```python\n{code}```\n"


def _plain(link):
    if not (ROOT / link[2]).exists():
        raise FileNotFoundError(f"{link[0]}: {ROOT / link[2]}")
    return link[1]
