"""What pictures are as documents: whole, escaped, self-contained, and able to look up bytes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from kvpool import NSAPool
from kvpool.item import Cell, Repeat
from kvpool.render.html import html
from kvpool.render.svg import svg
from tests.kvpool.render.test_memory_map import COMMON, layout_of
from tests.kvpool.render.test_svg import SVG, drawing, hybrid
from tests.processes import python
from tests.test_imports import BLOCKED


@pytest.mark.parametrize("title", ["plain", '<b> & "quoted" </script><script>alert(1)</script> ü'])
def test_names_cannot_break_out_of_svg_or_html(title):
    name = title[:100]
    layout = layout_of(Repeat(name, 3, Cell(name, 64, "bf16")), name)
    root, _ = drawing(layout, title)
    assert root.find(f"{SVG}title").text == title
    page = Page(html(layout, title))
    assert page.texts("title")[0] == title
    assert len(page.texts("script")) == 1
    assert any(name in text for text in page.texts("li"))


def test_pictures_need_nothing_from_elsewhere():
    layout = hybrid().layout
    for text in (svg(layout), html(layout)):
        assert not re.findall(r"(?:href|src|@import|fetch|http(?!://www.w3.org/2000/svg))", text)


def test_pictures_need_no_torch():
    python(
        "-c",
        BLOCKED.format(blocked={"torch"})
        + """
from kvpool.item import Cell, item_regions
from kvpool.layout import Buffer, PoolLayout, Space
from kvpool.render.html import html
from kvpool.render.memory_map import where
from kvpool.render.svg import svg
regions = item_regions(Cell("k", 8, "bf16"), owner="target", layer=0, buffer="b")
layout = PoolLayout((Buffer("b", "s", 0, 16, 16, 2),), regions, (Space("s", "slot"),), 1)
assert "bytes 0 to 15" in svg(layout) and "bytes 0 to 15" in html(layout)
assert where(layout, "b", 3).byte == 3
""",
    )


def test_the_page_looks_up_bytes_in_the_layouts_own_numbers():
    layout = NSAPool(layers=[0, 1], packing="fp8", **COMMON).layout
    script = Page(html(layout)).texts("script")[0]
    data = json.loads(re.search(r"const maps = (.*);", script).group(1))
    assert [item["bytes"] for item in data] == [41_984, 8_448]
    expected = {"name": "index_key.scale", "offset": 8_192, "width": 4, "element": 4}
    (axis,) = data[1]["regions"][1]["axes"]
    assert data[1]["regions"][1].items() >= {**expected, "dtype": "float32"}.items()
    assert axis.items() >= {"name": "entry", "size": 64, "stride": 4, "start": 0}.items()


def test_the_page_shows_every_map_and_every_region():
    layout = hybrid().layout
    page = Page(html(layout, "hybrid"))
    assert len(page.texts("section")) == 4
    assert page.texts("h1") == ["hybrid"]
    assert "target conv.q, conv.k, conv.v: layers 0-2, 4-6" in page.texts("h2")
    regions = {words.partition(":")[0] for words in page.texts("li")}
    assert regions == {"k", "v", "conv.q", "conv.k", "conv.v", "temporal"}


class Page(HTMLParser):
    """An HTML page: every tag closed in order, and the texts inside each."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, ""])
        if tag not in self.VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][1] += data

    def texts(self, tag):
        return [text for name, text in self.elements if name == tag and text]
