"""The page of a map under a finger and a mouse: it says what a byte is."""

from __future__ import annotations

import json

import pytest

from kvpool import NSAPool
from kvpool.render.html import html

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
