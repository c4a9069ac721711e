"""What `make docs` adds to the documents, without its environment: the first page's code, pictures
that commands draw, the order of members in the Python reference.
"""

from __future__ import annotations

import importlib
import re
import runpy
import xml.etree.ElementTree as ET
from dataclasses import fields, is_dataclass

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from tests.document_programs import LANDING, ROOT

PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
ORDER = runpy.run_path(str(ROOT / "docs" / "order.py"))["ORDER"]
WRITTEN = [
    (page, command)
    for page, commands in PICTURES["COMMANDS"].items()
    for command in commands
    if page != "index.md"
]


def test_the_first_page_shows_ten_lines_of_code():
    assert len([line for line in LANDING.read_text().splitlines() if line]) == 10


def test_the_first_page_has_the_picture_that_its_command_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = PICTURES["LANDING"].split()
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    drawing = ET.parse(command[-1]).getroot()
    words = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert any(text and text.startswith("latent.scale: float32") for text in words)
    assert f'<img src="pictures/{command[-1]}"' in PICTURES["figure"](PICTURES["LANDING"])


@pytest.mark.parametrize(("page", "command"), WRITTEN)
def test_a_picture_stands_behind_the_block_that_has_its_command(page, command):
    text = (ROOT / "docs" / page).read_text()
    shown = PICTURES["with_pictures"](page, text)
    picture = PICTURES["figure"](command)
    before, _, after = shown.partition(picture)
    assert after.startswith("\n") and before.count("```") % 2 == 0
    *_, block = re.sub(r"<figure.*</figure>\n\n", "", before).rstrip().split("\n\n")
    assert command in block
    assert re.sub(r"\n<figure.*</figure>\n\n", "", shown) == text


def test_pictures_of_one_block_stand_in_the_order_of_its_commands():
    text = PICTURES["with_pictures"]("commands.md", (ROOT / "docs" / "commands.md").read_text())
    names = re.findall(r'<iframe src="pictures/(\S+)"', text)
    assert names == ["map.html", "plan.html"]


def test_a_page_without_the_command_of_its_picture_is_refused():
    with pytest.raises(RuntimeError, match=r"docs/performance.md has no command `kvpool demo"):
        PICTURES["with_pictures"]("performance.md", "Nothing.\n")


def test_a_command_that_is_not_there_says_what_would_help(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match=r"kvpool describe .*none: No such file.*make docs"):
        PICTURES["draw"](tmp_path)


def test_signatures_in_the_reference_have_links_and_members_are_not_sorted():
    options = (ROOT / "mkdocs.yml").read_text().partition("          options:\n")[2]
    wanted = {
        *("separate_signature: true", "signature_crossrefs: true", "members_order: source"),
        *("show_signature_annotations: true", "group_by_category: false"),
    }
    assert wanted <= {line.strip() for line in options.splitlines()}


@pytest.mark.parametrize("name", ORDER)
def test_a_class_has_all_its_members_in_the_reference_in_the_order_of_use(name):
    module, _, owner = name.rpartition(".")
    kind = getattr(importlib.import_module(module), owner)
    listed = ORDER[name].split()
    attributes = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    public = {member for member in dir(kind) if member[0] != "_"}
    documented = {member for member in public - attributes if getattr(kind, member).__doc__}
    assert sorted(listed) == sorted({*listed})
    assert documented <= {*listed} <= public | attributes
