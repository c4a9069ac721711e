"""Layouts as SVG: a memory map, to scale, of one item of each kind.

A map is read like a hex dump: rows of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvpool.layout import PoolLayout, Region
from kvpool.layout.sentences import axis_steps, steps
from kvpool.render.drawing import HUES, LEFT, LINE, RIGHT, STYLE, WIDTH, add, drawn
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.text import space_words


def svg(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained SVG: for each kind of item its map and a legend of its regions."""
    width = LEFT + WIDTH + RIGHT
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", width=f"{width}")
    add(root, "title", title)
    add(root, "style", STYLE)
    root.append(hatch())
    add(root, "rect", x=0, y=0, width="100%", height="100%", style="fill:#fff;stroke:none")
    add(root, "text", title, x=LEFT, y=30, class_="head")
    top = 44.0
    maps = item_maps(layout)
    for item, colours in zip(maps, palettes(maps)):
        add(root, "text", heading(item), x=LEFT, y=top + 24, class_="head")
        add(root, "text", facts(item), x=LEFT, y=top + 44)
        drawing, height = drawn(item, colours)
        drawing.set("transform", f"translate(0 {top + 52:.1f})")
        root.append(drawing)
        top = _legend(root, item, colours, top + 52 + height) + 20
    root.set("height", f"{top:.0f}")
    root.set("viewBox", f"0 0 {width} {top:.0f}")
    return ElementTree.tostring(root, encoding="unicode")


def hatch() -> Element:
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
    add(pattern, "rect", width=6, height=6, style="fill:#eee;stroke:none")
    add(pattern, "line", x1=0, y1=0, x2=0, y2=6, style="stroke:#aaa;stroke-width:2")
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
    return [f"{axis_steps(axis)}, every {axis.stride:,}" for axis in region.axes_by_stride]


def palettes(maps: Sequence[ItemMap]) -> list[dict[Region, str]]:
    """A colour for each region of each map, the same for equal roles where possible."""
    roots = dict.fromkeys(_root(region) for item in maps for region in item.regions)
    hue = {root: HUES[number % len(HUES)] for number, root in enumerate(roots)}
    found = []
    for item in maps:
        dark = [region.role.endswith(".scale") for region in item.regions]
        colours = [hue[_root(region)][d] for region, d in zip(item.regions, dark)]
        if len(set(colours)) < len(colours):
            flat = [colour for shade in zip(*HUES) for colour in shade]
            colours = [flat[n % len(flat)] for n in range(len(colours))]
        found.append(dict(zip(item.regions, colours)))
    return found


def _root(region: Region) -> str:
    """`c4.latent.scale` as `latent`."""
    return region.role.removesuffix(".scale").rpartition(".")[2]


def _legend(root: Element, item: ItemMap, colours: dict[Region, str], y: float) -> float:
    columns = (LEFT + 20, LEFT + 210, LEFT + 330, LEFT + 420, LEFT + 540)
    names = ("region", "dtype", "first byte", "cell", "axes: steps and strides in bytes")
    for x, name in zip(columns, names):
        add(root, "text", name, x=x, y=y + LINE, class_="small")
    for region in item.regions:
        y += LINE + 4
        swatch = {"x": LEFT, "y": y + 4, "width": 14, "height": 14}
        add(root, "rect", fill=colours[region], **swatch)
        cell = f"{region.width:,} bytes"
        axes = "; ".join(axes_words(region)) or "none"
        row = (item.name(region), region.dtype, f"{region.offset:,}", cell, axes)
        for x, text in zip(columns, row):
            add(root, "text", text, x=x, y=y + LINE)
    if item.unclaimed:
        y += LINE + 4
        add(root, "rect", class_="gap", x=LEFT, y=y + 4, width=14, height=14)
        words = f"{item.unclaimed_name}: {item.unclaimed:,} bytes in all"
        add(root, "text", words, x=columns[0], y=y + LINE)
    return y + LINE + 4
