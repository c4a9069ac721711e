"""SVG pictures of items against what every one of their bytes is."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from kvpool import HybridLinearPool, MHAPool, MLAPool, Shard
from kvpool.item import Cell, Pad, Repeat, Seq, Skip, item_regions
from kvpool.layout import Axis, Buffer, PoolLayout, Region, Space
from kvpool.layout.formats import MHA, gated_delta_net
from kvpool.render.html import html
from kvpool.render.memory_map import item_maps, where
from kvpool.render.svg import MAX_BYTE_WIDTH, svg
from tests.kvpool.layout.test_template import templates
from tests.kvpool.render.test_memory_map import COMMON, SLOT, layout_of

SVG = "{http://www.w3.org/2000/svg}"
UNCLAIMED = ("padding", "not described")


def drawing(layout, title="t"):
    """The root, and the groups that are maps."""
    root = ElementTree.fromstring(svg(layout, title))
    return root, root.findall(f"{SVG}g")


def boxes(group):
    """(first byte, end, x, y, width, tooltip) of the boxes of a map."""
    names = "data-from", "data-to", "x", "y", "width"
    for rect in group.iter(f"{SVG}rect"):
        first, end, *place = (float(rect.get(name)) for name in names)
        yield int(first), int(end), *place, rect.find(f"{SVG}title").text


def hidden(group):
    """(rows, bytes a row) of what a map says it leaves out."""
    texts = [text.text or "" for text in group.iter(f"{SVG}text")]
    matches = [re.match(r"… ([\d,]+) more rows like these, every ([\d,]+) bytes", t) for t in texts]
    return [tuple(int(n.replace(",", "")) for n in m.groups()) for m in matches if m]


def check_map(layout):
    """Every byte is in one box of its region, whose steps are the byte's, to the scale of its row;
    or left out among rows that hold the same regions at the same bytes.
    """
    _, (group,) = drawing(layout)
    size = layout.buffers[0].item_bytes
    places = [where(layout, "b", byte) for byte in range(size)]
    roles = [place and place.region.role for place in places]
    left_out = hidden(group)
    rows = {}
    for box in boxes(group):
        rows.setdefault(box[3], []).append(box)
    at = 0
    for row in rows.values():
        start, end, left = row[0][0], row[-1][1], row[0][2]
        if start != at:
            count, length = left_out.pop(0)
            assert start - at == count * length
            before = roles[at - length : at]
            assert all(roles[n : n + length] == before for n in range(at, start, length))
            at = start
        scale = (row[-1][2] + row[-1][4] - left) / (end - start)
        assert scale <= MAX_BYTE_WIDTH + 0.01
        for first, stop, x, _, width, tooltip in row:
            assert first == at
            assert x - left == pytest.approx((first - start) * scale, abs=0.1)
            assert width == pytest.approx((stop - first) * scale, abs=0.1)
            name, *steps = tooltip.partition(":")[0].split(", ")
            assert set(roles[first:stop]) == {None if name in UNCLAIMED else name}
            for place in (places[first], places[stop - 1]):
                numbers = place.numbers.items() if place else ()
                assert {*steps} <= {f"{axis} {step}" for axis, step in numbers}
            at = stop
    assert at == size and not left_out


@settings(max_examples=60)
@given(templates(), st.integers(1, 40))
def test_every_byte_is_drawn_in_its_region_or_left_out_among_rows_like_it(template, many):
    check_map(layout_of(Repeat("outer", many, template)))


FORMATS = {
    "mla 656": Repeat(
        "tap", 64, Seq(Cell("latent", 512, "e4m3"), Cell("s", 4, "f32"), Cell("rope", 64, "bf16"))
    ),
    "v4 584": Pad(
        576,
        Seq(
            Repeat("tap", 64, Seq(Cell("latent", 448, "e4m3"), Cell("rope", 64, "bf16"))),
            Repeat("tap", 64, Seq(Cell("latent.scale", 7, "ue8m0"), Skip(1))),
        ),
    ),
    "one long cell": Cell("temporal", 1 << 14, "f32"),
    "nothing": Skip(1000),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_map_of_a_real_format_shows_all_its_bytes(name):
    check_map(layout_of(FORMATS[name]))


def test_regions_that_share_no_outer_axis_are_drawn_row_by_row():
    """Head by head beside row by row, and steps that reach into the next."""
    axes = (Axis("head", 2, 256), Axis("row", 4, 64)), (Axis("row", 8, 64),)
    regions = [
        Region("target", 0, role, "b", offset, "uint8", grid, 16)
        for role, offset, grid in zip("kv", (0, 16), axes)
    ]
    interlocked = (Axis("a", 2, 110), Axis("b", 10, 20))
    regions.append(Region("target", 0, "x", "b", 512, "uint8", interlocked, 10))
    check_map(PoolLayout((Buffer("b", "state", 0, 812, 812, 2),), regions, (SLOT,), 1))


def test_a_page_of_64_rows_shows_the_first_three_and_the_last():
    _, (group,) = drawing(MLAPool(layers=[0], packing="fp8", **COMMON).layout)
    assert len({y for _, _, _, y, *_ in boxes(group)}) == 4
    texts = {text.text for text in group.iter(f"{SVG}text")}
    assert "… 60 more rows like these, every 656 bytes: entry 3-62" in texts
    assert {"0", "656", "1,312", "41,328", "entry 63"} <= texts
    (title,) = [t for from_, *_, t in boxes(group) if from_ == 512]
    assert title == "latent.scale, entry 0: bytes 512 to 527 of the item"


def test_rows_and_cells_beyond_what_can_be_read_are_said_to_be_left_out():
    uneven = Seq(*(Seq(Cell(f"r{n}", n + 1, "uint8"), Skip(128)) for n in range(600)))
    _, (group,) = drawing(layout_of(uneven))
    texts = [text.text or "" for text in group.iter(f"{SVG}text")]
    assert any(
        re.fullmatch(r"… bytes [\d,]+ to [\d,]+: too many rows to be drawn", t) for t in texts
    )
    sparse = Repeat("head", 2, Repeat("dim", 1 << 16, Seq(Cell("k", 1, "uint8"), Skip(1))))
    _, (group,) = drawing(layout_of(sparse))
    assert sum("too many cells to be drawn" in tooltip for *_, tooltip in boxes(group)) == 2


def test_an_item_of_astronomic_size_is_drawn_at_once():
    template = Repeat("head", 1 << 40, Repeat("dim", 1 << 10, Cell("k", 1, "uint8")))
    _, (group,) = drawing(layout_of(template))
    assert hidden(group) == [((1 << 40) - 4, 1 << 10)]


# which maps there are


def hybrid(full=MHA(2, 64), linear=gated_delta_net(4, 8, 16, 16, 4), **more):
    """Pages of attention, and states of linear attention."""
    kinds = {"full": full, "linear": linear, "linear_layers": [0, 1, 2, 4, 5, 6], "dtype": "bf16"}
    return HybridLinearPool(layers=range(8), num_slots=3, **kinds, **{**COMMON, **more})


def test_layers_that_look_alike_are_one_map():
    layout = hybrid().layout
    full, linear = (3, 7), (0, 1, 2, 4, 5, 6)
    maps = [(item.regions[0].role, item.layers) for item in item_maps(layout)]
    assert maps == [("k", full), ("v", full), ("conv.q", linear), ("temporal", linear)]
    root, groups = drawing(layout)
    assert len(groups) == 4
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "target conv.q, conv.k, conv.v: layers 0-2, 4-6" in texts
    assert "target k: layers 3, 7" in texts


@pytest.mark.parametrize(("padding", "name"), [(True, "padding"), (False, "not described")])
def test_bytes_of_no_region_are_called_what_the_layout_says_of_them(padding, name):
    layout = layout_of(Seq(Cell("k", 64, "uint8"), Skip(64)))
    layout = replace(layout, buffers=(replace(layout.buffers[0], padding=padding),))
    root, (group,) = drawing(layout)
    assert f"{name}: bytes 64 to 127 of the item" in {box[-1] for box in boxes(group)}
    words = " ".join(root.itertext()) + html(layout)
    assert f"; {name}: 64;" in words and f'"unclaimed": "{name}"' in words
    (other,) = {*UNCLAIMED} - {name}
    assert other not in re.sub("(?s)<style>.*?</style>", "", words)


def test_items_at_another_stride_or_of_another_shard_are_maps_of_their_own():
    common = {"dtype": "bf16", **COMMON}
    for placement, stride in (("layer", 73728), ("page", 147456)):
        layout = MLAPool(layers=[0, 1], placement=placement, **common).layout
        assert {item.buffers[0].item_stride for item in item_maps(layout)} == {stride}
    pool = MHAPool(layers=[0], num_kv_heads=8, head_dim=64, shard=Shard(1, 4), **common)
    root, _ = drawing(pool.layout)
    assert any("head 2-3 of 8, every 128" in (t.text or "") for t in root.iter(f"{SVG}text"))


def test_layers_in_one_buffer_are_told_apart():
    rows = Repeat("entry", 4, Cell("k", 8, "bf16"))
    (region,) = item_regions(rows, owner="target", layer=5, buffer="b")
    moved = [region, replace(region, layer=6, offset=64)]
    space = Space("kv", entries_per_item=4)
    layout = PoolLayout((Buffer("b", "kv", 0, 128, 128, 2),), moved, (space,), 9)
    root, (group,) = drawing(layout)
    names = {box[-1].partition(",")[0] for box in boxes(group)}
    assert names == {"k (layer +0)", "k (layer +1)"}
    assert "target k: layers 5-6" in [text.text for text in root.iter(f"{SVG}text")]


def test_every_role_has_a_colour_of_its_own():
    template = Seq(*(Cell(f"x{n}.k", 64, "uint8") for n in range(16)))
    _, (group,) = drawing(layout_of(template))
    fills = [rect.get("fill") for rect in group.iter(f"{SVG}rect")]
    assert len(set(fills)) == len(fills) == 16


def test_an_item_of_many_regions_is_drawn_in_good_time():
    template = Seq(*(Cell(f"r{n}", 1 + n % 3, "uint8") for n in range(20_000)))
    began = time.monotonic()
    drawing(layout_of(template))
    assert time.monotonic() - began < 20
