"""IPython shows what a notebook would."""

from __future__ import annotations

from base64 import b64decode
from xml.etree import ElementTree

import pytest
from IPython.core.interactiveshell import InteractiveShell

from kvpool import MHAPool


@pytest.fixture
def pool():
    sizes = {"num_kv_heads": 4, "head_dim": 64, "page_size": 16, "num_pages": 4}
    return MHAPool(layers=range(2), dtype="f32", model="<b>", device="meta", **sizes)


@pytest.fixture
def shown(tmp_path):
    """What a notebook gets of an object, as HTML."""
    shell = InteractiveShell(ipython_dir=str(tmp_path))
    shell.run_line_magic("load_ext", "kvpool.render.notebook")
    return lambda value: shell.display_formatter.format(value, include={"text/html"})[0][
        "text/html"
    ]


@pytest.mark.parametrize("part", ["pool", "layout"])
def test_a_map_follows_the_table(pool, shown, part):
    value = pool if part == "pool" else pool.layout
    table, mark, image = shown(value).partition("<img ")
    assert mark and table == pool.layout._repr_html_() and "<b>" not in image
    encoded = image.partition("base64,")[2].removesuffix('">')
    drawing = ElementTree.fromstring(b64decode(encoded))
    titles = [title.text for title in drawing.findall(".//{*}title")]
    assert titles[0] == repr(value)
    # entries of 4 heads of 64 elements of 4 bytes, one after the other
    assert "k, entry 1, head 2: bytes 1,536 to 1,791 of the item" in titles


def test_other_objects_are_shown_as_before(shown):
    with pytest.raises(KeyError):
        shown(1)
