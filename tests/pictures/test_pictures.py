"""Every picture in a browser: on a phone, a tablet and a desktop, in light and dark; and the page
of a map under a finger and a mouse, which says what a byte is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool import NSAPool
from kvpool.render.html import html
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


# an item: 64 rows of 512 latents, 16 bytes of scales, 128 bytes of rope
CELL = "document.querySelector('rect[data-from=\"%d\"]').getBoundingClientRect()"


@pytest.fixture
def shown(page, folder):
    """Shows the map in a window of some pixels."""
    layout = NSAPool(layers=[0, 1], packing="fp8", num_pages=2, page_size=64).layout
    file = folder / "map-nsa.html"
    file.write_text(html(layout, "nsa"), encoding="utf-8")

    def show(width):
        page.open(file, width)
        return page

    return show


def told(page):
    return page.run("document.querySelector('output').textContent")


@pytest.mark.parametrize(("width", "press"), [(390, "tap"), (1600, "click")])
def test_a_box_that_is_pressed_shows_what_its_byte_is(shown, width, press):
    page = shown(width)
    box = json.loads(page.run(f"JSON.stringify({CELL % 656})"))
    getattr(page, press)(box["x"] + 0.25 * box["width"], box["y"] + box["height"] / 2)
    byte = int(page.run("document.querySelector('input').value"))
    assert byte == pytest.approx(656 + 128, abs=2)
    number = byte - 656
    assert told(page) == f"latent, entry 1: byte {number} of 512, float8_e4m3fn number {number}"
    assert page.run("document.querySelectorAll('rect.found').length") == 1
    assert not page.problems


@pytest.mark.parametrize(
    ("byte", "words"),
    [
        (655, "rope, entry 0: byte 127 of 128, bfloat16 number 63"),
        (512, "latent.scale, entry 0: byte 0 of 16, float32 number 0"),
        (30_000, "latent, entry 45: byte 480 of 512, float8_e4m3fn number 480"),
        (64 * 656, "an item has bytes 0 to 41,983"),
    ],
)
def test_a_byte_that_is_typed_in_is_looked_up(shown, byte, words):
    page = shown(900)
    page.run(
        "(() => { const asked = document.querySelector('input');"
        f"asked.value = {byte}; asked.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
    )
    assert told(page) == words


@pytest.mark.parametrize("name", PICTURES)
def test_words_stand_out_from_what_they_are_on(page, files, name):
    for dark, paper in ((False, "#fff"), (True, "#15181c")):
        page.open(files / name, 900, dark=dark)
        script = "getComputedStyle(document.documentElement).getPropertyValue('--paper')"
        assert page.run(script) == paper
        contrasts = page.run(CONTRAST)
        assert contrasts and not {words: c for words, c in contrasts.items() if c < 3.5}
