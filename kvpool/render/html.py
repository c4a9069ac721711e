"""A layout as an HTML page: maps, their regions, and a look-up of bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from kvpool.layout import PoolLayout
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.page import asset, legend, page, text
from kvpool.render.svg import Colours, facts, heading, map_svg, region_words, role_colours

HOW = (
    "The memory map of one item of each kind, in rows of equal length. Click or tap a box, or give "
    "a byte, to see what it is."
)


def html(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained page: the maps, their regions, and a look-up of bytes."""
    maps, colours = item_maps(layout), role_colours(layout)
    # "</script>" in a string would end the script
    data = json.dumps([_data(item) for item in maps]).replace("<", "\\u003c")
    script = f"const maps = {data};\n{asset('map.js')}"
    sections = [_section(number, item, colours) for number, item in enumerate(maps)]
    return page(title, f"<p>{HOW}</p>", *sections, style=asset("map.css"), script=script)


def _section(number: int, item: ItemMap, colours: Colours) -> str:
    keys = [(colours[region.role], region_words(item, region)) for region in item.regions]
    byte = f'<input type="number" min="0" max="{item.item_bytes - 1}">'
    parts = (
        f'<section id="map-{number}"><h2>{text(heading(item))}</h2>',
        f"<p>{text(facts(item))}</p>",
        f'<div class="map">{map_svg(item, colours)}</div>',
        f'<form class="look"><label>what is byte {byte}</label> <output></output></form>',
        legend(keys),
        "</section>",
    )
    return "\n".join(parts)


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
