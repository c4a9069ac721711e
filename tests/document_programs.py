"""The Python programs of README.md, of docs/ and of the site's first page. `python -m
tests.document_programs FOLDER` writes them there, for type checkers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LANDING = ROOT / "docs" / "landing.py"
READ = [ROOT / "README.md", *PAGES]
# documents whose blocks are one program
TOLD_IN_ONE = {"add-a-pool.md", "quickstart-connector.md", "quickstart-models.md", "run-models.md"}


def programs() -> Iterator[tuple[str, int, str]]:
    """Each document's name, the number of a program in it, and its code."""
    for path in READ:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.S | re.M)
        if path.name in TOLD_IN_ONE:
            blocks = ["".join(blocks)]
        yield from ((path.name, number, code) for number, code in enumerate(blocks))
    yield "landing", 0, LANDING.read_text()


def write(folder: Path) -> None:
    """Each as a module of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for name, number, code in programs():
        module = name.removesuffix(".md").replace("-", "_")
        (folder / f"{module}_{number}.py").write_text(code)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
