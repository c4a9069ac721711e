"""Every picture in a browser: on a phone, a tablet and a desktop, in light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pictures.samples import PICTURES

WIDTHS = (390, 900, 1600)
LOOK, CONTRAST = (Path(__file__).with_name(f"{n}.js").read_text() for n in ("look", "contrast"))


WRONG = """<!doctype html><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><body style="margin: 0">
<div style="width: 500px">a wide box</div>
<div class="map" style="width: 90px; overflow: auto; position: relative">
<p style="position: absolute; left: -40px">left of its list</p></div>
<svg width="200" height="60"><text x="190" y="20">cut off</text><text x="10" y="50">over</text>
<text x="20" y="50">under</text></svg>
<script>console.error("an error"); lacking();</script></body>"""


@pytest.fixture(scope="module")
def files(folder):
    """The pictures, each in a file."""
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_outside_its_box_or_over_other_words(page, files, name, request):
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            page.open(files / name, width, dark=scheme == "dark")
            shot = f"{name.replace('.', '-')}-{width}-{scheme}.png"
            if request.config.getoption("--screenshots"):
                page.screenshot(files / shot)
            assert not page.problems
            assert page.run(f"{LOOK}({width})") == [], shot


def test_what_is_wrong_is_found(page, files):
    (files / "wrong.html").write_text(WRONG)
    page.open(files / "wrong.html", 390)
    found = "\n".join(page.run(f"{LOOK}(390)"))
    for words in ("pixels wide", "a wide box: sticks out", "left of its list: sticks out"):
        assert words in found
    assert "cut off: is outside its drawing" in found and "over: covers under" in found
    assert len(page.problems) == 2
    page.problems.clear()


@pytest.mark.parametrize("name", PICTURES)
def test_words_stand_out_from_what_they_are_on(page, files, name):
    for dark, paper in ((False, "#fff"), (True, "#15181c")):
        page.open(files / name, 900, dark=dark)
        script = "getComputedStyle(document.documentElement).getPropertyValue('--paper')"
        assert page.run(script) == paper
        contrasts = page.run(CONTRAST)
        assert contrasts and not {words: c for words, c in contrasts.items() if c < 3.5}
