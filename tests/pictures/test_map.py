"""The page of a map under a finger, a mouse and keys: it moves, zooms and says what a cell is."""

from __future__ import annotations

import json

import pytest

from kvpool import NSAPool
from kvpool.render.html import html

# an item: 64 rows of 512 latents, 16 bytes of scales, 128 bytes of rope
CELL = "document.querySelector('rect[data-from=\"%d\"]').getBoundingClientRect()"
VIEW = "document.querySelector('.map')"


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


def at(page, byte, part=0.5):
    """The pixel inside a box that begins at a byte."""
    box = json.loads(page.run(f"JSON.stringify({CELL % byte})"))
    return box["x"] + part * box["width"], box["y"] + box["height"] / 2


def told(page):
    return page.run("document.querySelector('output.what').textContent").split("\n")


def asked(page):
    return page.run("document.querySelector('input.byte').value")


def test_a_finger_on_a_cell_shows_what_it_is(shown):
    page = shown(390)
    page.tap(*at(page, 656, 0.25))
    byte = int(asked(page))
    assert byte == pytest.approx(656 + 128, abs=2)
    words = f"latent, entry 1: byte {byte - 656} of 512, float8_e4m3fn number {byte - 656}"
    assert told(page) == [words, "latent, entry 1: bytes 656 to 1,167 of the item"]
    assert page.run("document.querySelectorAll('rect.found').length") == 1


def test_a_click_on_a_label_is_one_on_its_cell(shown):
    page = shown(1600)
    x, y = at(page, 0, 0.02)
    page.drag(x, y, x, y)
    assert told(page)[1] == "latent, entry 0: bytes 0 to 511 of the item"


def test_the_mouse_drags_the_map_and_chooses_nothing(shown):
    page = shown(390)
    x, y = at(page, 656, 0.3)
    page.drag(x, y, x - 120, y)
    assert page.run(f"{VIEW}.scrollLeft") == pytest.approx(120, abs=1)
    assert asked(page) == ""


def test_keys_go_from_cell_to_cell_and_the_map_follows(shown):
    page = shown(390)
    page.run(f"{VIEW}.focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "Home"):
        page.press(key)
        seen.append(int(asked(page)))
    last = 63 * 656 + 528
    assert seen == [0, 512, 1168, 656, 0, last, 0]
    page.press("ArrowRight", "ArrowRight")
    assert told(page)[1] == "rope, entry 0: bytes 528 to 655 of the item"
    x, _ = at(page, 528)
    assert 0 < x < 390 and page.run(f"{VIEW}.scrollLeft") > 0


def test_keys_and_buttons_zoom_about_the_middle_and_the_page_stays_as_wide(shown):
    page = shown(390)
    page.run(f"{VIEW}.focus()")
    page.run(f"{VIEW}.scrollLeft = 300")
    before, at_first = at(page, 0)[0] - 195, page.run(CELL % 0 + ".width")
    page.press("+")
    assert page.run(CELL % 0 + ".width") == pytest.approx(1.5 * at_first, rel=0.01)
    assert at(page, 0)[0] - 195 == pytest.approx(1.5 * before, abs=3)
    page.run("document.querySelector('button[data-zoom=\"+\"]').click()")
    assert page.run(CELL % 0 + ".width") == pytest.approx(2.25 * at_first, rel=0.01)
    page.press(*"-" * 20)
    assert page.run(f"{VIEW}.scrollWidth - {VIEW}.clientWidth") <= 1
    page.press(*"+" * 20)
    assert page.run(CELL % 0 + ".width") == pytest.approx(8 * at_first, rel=0.01)
    page.press("0")
    assert page.run(CELL % 0 + ".width") == pytest.approx(at_first)
    assert page.run("document.documentElement.scrollWidth") == 390
    assert not page.problems


@pytest.mark.parametrize(
    ("byte", "first"),
    [
        (655, "rope, entry 0: byte 127 of 128, bfloat16 number 63"),
        (512, "latent.scale, entry 0: byte 0 of 16, float32 number 0"),
        (30_000, "latent, entry 45: byte 480 of 512, float8_e4m3fn number 480"),
        (64 * 656, "an item has bytes 0 to 41,983"),
    ],
)
def test_a_byte_that_is_typed_in_is_looked_up(shown, byte, first):
    page = shown(900)
    page.run(
        "(() => { const asked = document.querySelector('input.byte');"
        f"asked.value = {byte}; asked.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
    )
    assert told(page)[0] == first
