"""Every picture in a browser: on a phone, a tablet and a desktop, in light and dark."""

from __future__ import annotations

import pytest

from tests.pictures.samples import PICTURES

WIDTHS = (390, 900, 1600)
LOOK = """
(width => {
  const found = [], slack = 1;
  const say = (element, words) => found.push(
    `<${element.tagName} ${element.getAttribute("class") || ""}> `
    + `${(element.textContent || "").slice(0, 40)}: ${words}`);
  const outside = (box, frame) => box.left < frame.left - slack || box.right > frame.right + slack
    || box.top < frame.top - slack || box.bottom > frame.bottom + slack;
  const whole = document.documentElement, body = document.body;
  if (body) {
    if (whole.scrollWidth > width) say(whole, `is ${whole.scrollWidth} pixels wide`);
    for (const element of body.querySelectorAll("*")) {
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height || element.closest("svg")) continue;
      const view = element.parentElement.closest(".map");
      const left = view ? view.getBoundingClientRect().left - view.scrollLeft : 0;
      const right = view ? left + view.scrollWidth + 2 : width;
      if (box.left < left - slack || box.right > right + slack) say(element, "sticks out");
    }
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const frame = drawing.getBoundingClientRect();
    const own = element => element.closest("svg") === drawing && !element.closest("defs");
    for (const element of drawing.querySelectorAll("text, rect, circle, line"))
      if (own(element) && outside(element.getBoundingClientRect(), frame))
        say(element, "is outside its drawing");
    if (drawing.parentElement && drawing.parentElement.closest("svg")) continue;
    const texts = [...drawing.querySelectorAll("text")]
      .map(element => [element, element.getBoundingClientRect()])
      .filter(([, box]) => box.width)
      .sort(([, a], [, b]) => a.top - b.top);
    texts.forEach(([element, box], at) => {
      for (const [other, next] of texts.slice(at + 1)) {
        if (next.top > box.bottom) break;
        const over = Math.min(box.right, next.right) - Math.max(box.left, next.left);
        const high = Math.min(box.bottom, next.bottom) - next.top;
        if (over > slack && high > 4) say(element, `covers ${other.textContent.slice(0, 40)}`);
      }
    });
  }
  return found;
})(%d)
"""
CONTRAST = """
(() => {
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper");
  const canvas = document.createElementNS("http://www.w3.org/1999/xhtml", "canvas");
  const context = canvas.getContext("2d");
  const light = colour => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05)
    / (Math.min(light(a), light(b)) + 0.05);
  const written = [...document.querySelectorAll("text, h1, p, td, th, pre, li, button")];
  return Object.fromEntries(written.map(element => {
    const style = getComputedStyle(element), drawn = element.tagName === "text";
    const inside = element.classList.contains("inside");
    const ink = drawn ? style.fill : style.color;
    return [`${ink} on ${inside ? style.stroke : paper}`,
      contrast(ink, inside ? style.stroke : paper)];
  }));
})()
"""


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
            assert page.run(LOOK % width) == [], shot


def test_what_is_wrong_is_found(page, files):
    (files / "wrong.html").write_text(WRONG)
    page.open(files / "wrong.html", 390)
    found = "\n".join(page.run(LOOK % 390))
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
