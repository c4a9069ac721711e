"""The README's code is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# documents whose blocks are one program
TOLD_IN_ONE = {"add-a-pool.md", "quickstart-connector.md", "quickstart-models.md", "run-models.md"}


def blocks(path):
    found = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.S | re.M)
    return ["".join(found)] if path.name in TOLD_IN_ONE else found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [(path, number, code) for path in PAGES for number, code in enumerate(blocks(path))]


@pytest.mark.parametrize(
    ("path", "number", "code"), BLOCKS, ids=[f"{p.name}-{n}" for p, n, _ in BLOCKS]
)
def test_code_in_documents_runs(path, number, code, capsys):
    exec(compile(code, f"{path.name} block {number}", "exec"), {"__name__": "document"})
    if path.name == "README.md" and "decode.wait" in code:
        said = capsys.readouterr().out
        assert "Success {'first_token': 7}" in said
        assert "target k" in said


def test_every_link_between_documents_leads_somewhere():
    for path in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
