"""A layout as an HTML page: maps, tables of regions, and a look-up of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from html import escape
from itertools import count

from kvpool.layout import PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.page import page
from kvpool.render.script import SCRIPT
from kvpool.render.svg import STYLE, axes_words, facts, hatching, heading, map_svg, palettes

CSS = """
.map { overflow: auto; max-height: 80vh; border: 1px solid var(--line); cursor: grab; }
.map:focus-visible { outline: 2px solid var(--found); outline-offset: 1px; }
.tools { display: flex; gap: 6px; margin: 8px 0; }
button { font: inherit; min-width: 40px; min-height: 36px; color: inherit; cursor: pointer;
  background: var(--bare); border: 1px solid var(--line); border-radius: 4px; }
input { font: inherit; } label, td:first-child { white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); }
th { font-weight: normal; color: var(--quiet); font-size: 12px; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
i.swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
.look { margin: 6px 0; } .look input { width: 7em; margin: 0 6px 0 4px; }
output { font-weight: 600; } output.what { display: block; white-space: pre-line; }
@media (max-width: 700px) {
  table, tbody, tr, td { display: block; } tr:first-child { display: none; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  td, td.number { border: 0; padding: 1px 0; text-align: left; }
  td::before { content: attr(data-head) " "; color: var(--quiet); }
  td:first-child::before, td:empty { content: ""; display: none; }
}
"""
HEADS = ("region", "dtype", "first byte", "bytes of a cell", "axes", "where is a cell?")
BUTTONS = (("-", "smaller", "−"), ("0", "size 1", "1:1"), ("+", "larger", "+"))
HOW = (
    "The memory map of one item of each kind: rows of equal length, to scale. Click or tap a cell "
    "to see what it is; drag to move the map. With the map in focus, arrow keys go from cell to "
    "cell, + and - zoom, 0 goes back."
)


def html(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained page: the maps, their regions as tables, and a look-up of bytes."""
    maps = item_maps(layout)
    # "</script>" in a string would end the script
    data = json.dumps([_data(item) for item in maps]).replace("<", "\\u003c")
    sections = map(_section, count(), maps, palettes(maps))
    script = f"const maps = {data};\n{SCRIPT}"
    return page(title, f"<p>{HOW}</p>", hatching(), *sections, style=STYLE + CSS, script=script)


def _section(number: int, item: ItemMap, colours: Mapping[Region, str]) -> str:
    rows = "\n".join(_row(item, number, colours) for number in range(len(item.regions)))
    heads = "".join(f"<th>{name}</th>" for name in HEADS)
    buttons = "".join(
        f'<button type="button" data-zoom="{key}" aria-label="{words}">{sign}</button>'
        for key, words, sign in BUTTONS
    )
    name = escape(heading(item))
    return (
        f'<section id="map-{number}">\n<h2>{name}</h2>\n<p>{escape(facts(item))}</p>\n'
        f'<div class="tools">{buttons}</div>\n'
        f'<div class="map" tabindex="0" role="application" aria-label="map: {name}">'
        f"{map_svg(item, colours)}</div>\n"
        '<form class="look"><label>what is byte <input class="byte" type="number" min="0" '
        f'max="{item.item_bytes - 1}"></label><output class="what"></output></form>\n'
        f'<div class="scroll"><table>\n<tr>{heads}</tr>\n{rows}\n</table></div>\n</section>'
    )


def _row(item: ItemMap, number: int, colours: Mapping[Region, str]) -> str:
    """The row of a region in the table."""
    region = item.regions[number]
    fields = "".join(
        f'<label>{escape(axis.name)} <input type="number" min="{axis.start}" '
        f'max="{axis.stop - 1}" value="{axis.start}"></label> '
        for axis in region.axes_by_stride
    )
    form = f'<form class="look where" data-region="{number}">{fields}<output></output></form>'
    swatch = f'<i class="swatch" style="background:{colours[region]}"></i>'
    cells = (
        ("word", swatch + escape(item.name(region))),
        ("word", region.dtype),
        ("number", f"{region.offset:,}"),
        ("number", f"{region.width:,}"),
        ("word", "<br>".join(map(escape, axes_words(region))) or "none"),
        ("word", form if fields else ""),
    )
    written = "".join(
        f'<td class="{kind}" data-head="{head}">{text}</td>'
        for head, (kind, text) in zip(HEADS, cells)
    )
    return f"<tr>{written}</tr>"


def _data(item: ItemMap) -> dict[str, object]:
    """An item as the script reads it: regions as they are, but for the order of their axes."""
    regions = [
        {
            **asdict(replace(region, axes=tuple(region.axes_by_stride))),
            "name": item.name(region),
            "element": ITEMSIZE[region.dtype],
        }
        for region in item.regions
    ]
    return {"bytes": item.item_bytes, "unclaimed": item.unclaimed_name, "regions": regions}
