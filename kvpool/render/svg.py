"""Layouts as SVG: a memory map, to scale, of one item of each kind.

A map is read like a hex dump: rows of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from textwrap import wrap
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvpool.layout import PoolLayout, Region
from kvpool.layout.sentences import axis_steps, steps
from kvpool.render.drawing import HUES, LEFT, LETTER, LINE, RIGHT, SHADES, STYLE, WIDTH, add, drawn
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.page import THEME
from kvpool.render.text import space_words

HEAD_LETTER, HEAD_LINE = 10.5, 22  # pixels


def svg(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained SVG: for each kind of item its map and a legend of its regions."""
    root = Element("svg", xmlns="http://www.w3.org/2000/svg")
    add(root, "title", title)
    add(root, "style", THEME + STYLE)
    root.append(_hatch())
    add(root, "rect", class_="paper", width="100%", height="100%")
    top, width = _lines(root, title, 14.0, class_="head"), 0.0
    maps = item_maps(layout)
    for item, colours in zip(maps, palettes(maps)):
        top = _lines(root, heading(item), top + 18, class_="head")
        top = _lines(root, facts(item), top)
        drawing, wide, height = drawn(item, colours)
        drawing.set("transform", f"translate(0 {top + 4:.1f})")
        root.append(drawing)
        right, top = _legend(root, item, colours, top + 4 + height)
        width, top = max(width, wide, right), top + 20
    root.set("width", f"{width:.0f}")
    root.set("height", f"{top:.0f}")
    root.set("viewBox", f"0 0 {width:.0f} {top:.0f}")
    return ElementTree.tostring(root, encoding="unicode")


def map_svg(item: ItemMap, colours: dict[Region, str]) -> str:
    """The map of an item, to stand in a page that has `hatching` once."""
    drawing, *size = drawn(item, colours)
    width, height = (f"{pixels:.0f}" for pixels in size)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", width=width, height=height)
    root.set("viewBox", f"0 0 {width} {height}")
    root.append(drawing)
    return ElementTree.tostring(root, encoding="unicode")


def hatching() -> str:
    """What fills bytes that no region claims, for all maps of a page."""
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", style="position:absolute;height:0")
    root.append(_hatch())
    return ElementTree.tostring(root, encoding="unicode")


def _hatch() -> Element:
    """The fill pattern of bytes that no region claims."""
    defs = Element("defs")
    pattern = add(
        defs,
        "pattern",
        id="gap",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    add(pattern, "rect", width=6, height=6, style="fill:var(--bare);stroke:none")
    add(pattern, "line", x1=0, y1=0, x2=0, y2=6, style="stroke:var(--stripe);stroke-width:2")
    return defs


def heading(item: ItemMap) -> str:
    """Owner, roles and layers of a map."""
    owners = ", ".join(dict.fromkeys(region.owner for region in item.regions))
    roles = ", ".join(dict.fromkeys(region.role for region in item.regions))
    if not roles:
        return f"{item.buffers[0].name}: {item.unclaimed_name}"
    word = "layer" if len(item.layers) == 1 else "layers"
    return f"{owners} {roles}: {word} {steps(item.layers)}"


def facts(item: ItemMap) -> str:
    """Sizes of a map's items, and how ids address them."""
    buffer, words = item.buffers[0], []
    words.append(f"an item: {item.item_bytes:,} bytes, every {buffer.item_stride:,}")
    if item.unclaimed:
        words.append(f"{item.unclaimed_name}: {item.unclaimed:,}")
    many = f" in each of {len(item.buffers):,} buffers" if len(item.buffers) > 1 else ""
    words.append(f"items: {buffer.items:,}{many}")
    if item.over:
        words.append(f"in the same memory as {', '.join(item.over)}")
    return "; ".join([*words, space_words(item.space)])


def axes_words(region: Region) -> list[str]:
    """`head 4-7 of 8, every 256` for each axis, largest stride first."""
    words = [f"{axis_steps(axis)}, every {axis.stride:,}" for axis in region.axes_by_stride]
    return [f"packing {region.packing}, moved whole", *words] if region.packing else words


def palettes(maps: Sequence[ItemMap]) -> list[dict[Region, str]]:
    """A colour for each region of each map, the same for equal roles where possible."""
    roots = dict.fromkeys(_root(region) for item in maps for region in item.regions)
    hue = {root: HUES[number % len(HUES)] for number, root in enumerate(roots)}
    paints = []
    for item in maps:
        dark = [region.role.endswith(".scale") for region in item.regions]
        colours = [hue[_root(region)][d] for region, d in zip(item.regions, dark)]
        if len(set(colours)) < len(colours):
            colours = [SHADES[n % len(SHADES)] for n in range(len(colours))]
        paints.append(dict(zip(item.regions, colours)))
    return paints


def _root(region: Region) -> str:
    """`c4.latent.scale` as `latent`."""
    return region.role.removesuffix(".scale").rpartition(".")[2]


def _lines(root: Element, text: str, y: float, **style: str) -> float:
    """Writes lines of text below `y`; where they end, in pixels."""
    letter, height = (HEAD_LETTER, HEAD_LINE) if style else (LETTER, LINE)
    for line in wrap(text, int((WIDTH + RIGHT) / letter)):
        y += height
        add(root, "text", line, x=LEFT, y=y, **style)
    return y + 4


def _legend(
    root: Element, item: ItemMap, colours: dict[Region, str], y: float
) -> tuple[float, float]:
    """Draws a table of regions at `y`; its right and its bottom, in pixels."""
    rows = [("region", "dtype", "first byte", "cell", "axes: steps and strides in bytes")]
    for region in item.regions:
        axes = "; ".join(axes_words(region)) or "none"
        cell = f"{region.width:,} bytes"
        rows.append((item.name(region), region.dtype, f"{region.offset:,}", cell, axes))
    widths = [LETTER * max(map(len, column)) + 20 for column in zip(*rows)]
    columns = list(accumulate(widths, initial=LEFT + 20.0))
    for number, row in enumerate(rows):
        if number:
            place = {"x": LEFT, "y": y + 4, "width": 14, "height": 14}
            add(root, "rect", fill=colours[item.regions[number - 1]], **place)
        for x, text in zip(columns, row):
            style = {} if number else {"class_": "small"}
            add(root, "text", text, x=x, y=y + LINE, **style)
        y += LINE + 4
    if item.unclaimed:
        add(root, "rect", class_="gap", x=LEFT, y=y + 4, width=14, height=14)
        words = f"{item.unclaimed_name}: {item.unclaimed:,} bytes in all"
        add(root, "text", words, x=columns[0], y=y + LINE)
        y += LINE + 4
    return columns[-1], y
