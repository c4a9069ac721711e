"""A layout as an HTML page: maps, tables of regions, and a look-up of bytes."""

from __future__ import annotations

import json
from html import escape
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvpool.layout import PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.render.drawing import LEFT, RIGHT, STYLE, WIDTH, drawn
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.svg import axes_words, facts, hatch, heading, palettes

CSS = """
body { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #222;
       margin: 24px auto; max-width: 1200px; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin: 36px 0 4px; } p { margin: 4px 0; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 8px 0; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #ddd; }
th { font-weight: normal; color: #666; font-size: 12px; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
i.swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
.look { color: #444; margin: 6px 0; } .look input { width: 7em; margin: 0 6px 0 4px; }
output { font-weight: 600; }
"""

SCRIPT = """
const number = n => n.toLocaleString("en");
function steps(at, axes, width) {
  if (!axes.length) return at >= 0 && at < width ? [at] : null;
  const [axis, ...finer] = axes;
  const reach = finer.reduce((sum, a) => sum + (a.size - 1) * a.stride, width);
  const one = axis.size === 1;
  const last = one ? 0 : Math.min(axis.size - 1, Math.floor(at / axis.stride));
  const first = one ? 0 : Math.max(0, Math.ceil((at - reach + 1) / axis.stride));
  for (let step = last; step >= first; step--) {
    const found = steps(at - step * axis.stride, finer, width);
    if (found) return [step, ...found];
  }
  return null;
}
function what(map, byte) {
  for (const region of map.regions) {
    const found = steps(byte - region.offset, region.axes, region.width);
    if (!found) continue;
    const inside = found.pop();
    const named = region.axes.map((axis, i) => axis.name + " " + (axis.start + found[i]));
    const element = Math.floor(inside / region.element);
    return [region.name, ...named].join(", ") + ": byte " + number(inside) + " of "
      + number(region.width) + ", " + region.dtype + " number " + number(element);
  }
  return map.unclaimed;
}
function show(section, byte) {
  for (const rect of section.querySelectorAll("rect[data-from]")) {
    const from = Number(rect.dataset.from), to = Number(rect.dataset.to);
    rect.classList.toggle("found", from <= byte && byte < to);
  }
}
maps.forEach((map, index) => {
  const section = document.getElementById("map-" + index);
  const [asked, told] = section.querySelectorAll("input.byte, output.what");
  asked.addEventListener("input", () => {
    const byte = Number(asked.value);
    const inside = asked.value !== "" && Number.isInteger(byte) && byte >= 0 && byte < map.bytes;
    told.textContent = inside ? what(map, byte) : "an item has bytes 0 to " + number(map.bytes - 1);
    show(section, inside ? byte : -1);
  });
  for (const form of section.querySelectorAll("form.where")) {
    const region = map.regions[form.dataset.region], inputs = [...form.querySelectorAll("input")];
    const told = form.querySelector("output");
    form.addEventListener("input", () => {
      let byte = region.offset, held = inputs.every(input => input.value !== "");
      region.axes.forEach((axis, i) => {
        const step = Number(inputs[i].value) - axis.start;
        held &&= Number.isInteger(step) && step >= 0 && step < axis.size;
        byte += step * axis.stride;
      });
      told.textContent = held
        ? "bytes " + number(byte) + " to " + number(byte + region.width - 1) : "no such cell here";
      show(section, held ? byte : -1);
    });
  }
  for (const form of section.querySelectorAll("form"))
    form.addEventListener("submit", event => event.preventDefault());
});
"""


def html(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained page: the maps, their regions as tables, and a look-up of bytes."""
    maps = item_maps(layout)
    # "</script>" in a string would end the script
    data = json.dumps([_data(item) for item in maps]).replace("<", "\\u003c")
    shared = Element("svg", xmlns="http://www.w3.org/2000/svg", style="position:absolute;height:0")
    shared.append(hatch())
    sections = [
        _section(number, item, colours)
        for number, (item, colours) in enumerate(zip(maps, palettes(maps)))
    ]
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{escape(title)}</title>\n<style>{CSS}{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        "<p>The memory map of one item of each kind: rows of equal length, to scale. Point at a "
        "cell to see what it is.</p>",
        ElementTree.tostring(shared, encoding="unicode"),
        *sections,
        f"<script>\nconst maps = {data};\n{SCRIPT}</script>\n</body>\n</html>\n",
    )
    return "\n".join(parts)


def _section(number: int, item: ItemMap, colours: dict[Region, str]) -> str:
    drawing, height = drawn(item, colours)
    size = f"{LEFT + WIDTH + RIGHT}", f"{height:.0f}"
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", width=size[0], height=size[1])
    svg.set("viewBox", " ".join(("0 0", *size)))
    svg.append(drawing)
    heads = ("region", "dtype", "first byte", "bytes of a cell", "axes", "where is a cell?")
    rows = "\n".join(_region(item, number, colours) for number in range(len(item.regions)))
    table = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<section id="map-{number}">\n<h2>{escape(heading(item))}</h2>\n'
        f"<p>{escape(facts(item))}</p>\n{ElementTree.tostring(svg, encoding='unicode')}\n"
        '<form class="look"><label>what is byte <input class="byte" type="number" min="0" '
        f'max="{item.item_bytes - 1}"></label><output class="what"></output></form>\n'
        f"<table>\n<tr>{table}</tr>\n{rows}\n</table>\n</section>"
    )


def _region(item: ItemMap, number: int, colours: dict[Region, str]) -> str:
    region = item.regions[number]
    name, colour = item.name(region), colours[region]
    fields = "".join(
        f'<label>{escape(axis.name)} <input type="number" min="{axis.start}" '
        f'max="{axis.stop - 1}" value="{axis.start}"></label>'
        for axis in region.axes_by_stride
    )
    form = f'<form class="look where" data-region="{number}">{fields}<output></output></form>'
    where = form if fields else ""
    return (
        f'<tr><td><i class="swatch" style="background:{colour}"></i>{escape(name)}</td>'
        f"<td>{region.dtype}</td>"
        f'<td class="number">{region.offset:,}</td><td class="number">{region.width:,}</td>'
        f"<td>{'<br>'.join(map(escape, axes_words(region))) or 'none'}</td><td>{where}</td></tr>"
    )


def _data(item: ItemMap) -> dict[str, object]:
    regions = [
        {
            "name": item.name(region),
            "dtype": region.dtype,
            "offset": region.offset,
            "width": region.width,
            "element": ITEMSIZE[region.dtype],
            "axes": [
                {"name": a.name, "size": a.size, "stride": a.stride, "start": a.start}
                for a in region.axes_by_stride
            ],
        }
        for region in item.regions
    ]
    return {"bytes": item.item_bytes, "unclaimed": item.unclaimed_name, "regions": regions}
