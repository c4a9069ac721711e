"""Layouts as SVG: a memory map of one item of each kind.

A map is read like a hex dump, in rows of equal length: bytes of regions that lie among one another
have rows of their own, as wide as the map. Each box has a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log2

from kvpool.layout import PoolLayout, Region
from kvpool.layout.text import axis_steps, steps
from kvpool.render.memory_map import MIN_ROW_BYTES, Band, ItemMap, item_maps
from kvpool.render.page import asset, text
from kvpool.render.text import space_words

LEFT, WIDTH, RIGHT = 92, 880, 178  # pixels: offsets, the map, steps
ROW, GAP, LINE, HEAD = 20, 2, 18, 30
MAX_BAR = 160  # pixels of the bar that shows a scale
SCALED_ROW_BYTES = 4096, 65536  # of maps of one scale: the least and the most that steps share
MAX_ROWS = 512  # of one map
SHOWN, HIDE_FROM = 3, 7  # first rows of a band that has so many alike; the last is shown too
MAX_BYTE_WIDTH = 8.0  # pixels
MIN_STEP_WIDTH = 6.0  # pixels of a step that gets its own box
MAX_LETTERS = 130  # of a line: what is longer is cut
SHADES = (
    *("#a6cee3", "#b2df8a", "#fdcb8a", "#cab2d6", "#fbb4b9", "#99d8c9", "#fff099", "#d9c2a7"),
    *("#1f78b4", "#33a02c", "#d95f02", "#6a3d9a", "#c51b8a", "#00796b", "#8c6d1f", "#7f4f24"),
)

Colours = Mapping[str, str]
"""By role."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How maps are drawn: in rows of so many bytes or more, each byte so many pixels wide. Without
    a width each row is as wide as the map.
    """

    row_bytes: int = MIN_ROW_BYTES
    byte_width: float | None = None

    def width(self, row: int) -> float:
        """Pixels of a byte of a row of so many bytes."""
        return self.byte_width or min(WIDTH / row, MAX_BYTE_WIDTH)


def svg(layout: PoolLayout, title: str = "layout") -> str:
    """One self-contained SVG: for each kind of item its map, and the colours of its regions."""
    colours, y = role_colours(layout), HEAD
    parts = [_text(LEFT, y, title, "head")]
    for item in item_maps(layout):
        y += HEAD
        parts += [_text(LEFT, y, heading(item), "head"), _text(LEFT, y + LINE, facts(item))]
        drawing, height = _map(item, colours)
        y += LINE + 4
        parts.append(f'<g transform="translate(0 {y})">{drawing}</g>')
        y += height
        for region in item.regions:
            y += LINE
            paint = f'fill="{colours[region.role]}"'
            parts.append(_rect(LEFT, y - 12, 14, height=14, attributes=paint))
            parts.append(_text(LEFT + 20, y, region_words(item, region)))
    style = asset("theme.css") + asset("map.css")
    paper = '<rect class="paper" width="100%" height="100%"/>'
    head = f"<title>{text(title)}</title><style>{style}</style>{paper}"
    return _sized(head + "".join(parts), y + LINE)


def map_svg(item: ItemMap, colours: Colours, scale: Scale = Scale()) -> str:
    """The map of an item, for a page that has the style sheets `theme.css` and `map.css`."""
    return _sized(*_map(item, colours, scale))


def common_scale(items: Sequence[ItemMap]) -> Scale:
    """One for all items, in rows about as long as the longest step."""

    def longest(row_bytes: int) -> int:
        rows = (band.row for item in items for band in item.bands(row_bytes))
        return max(rows, default=row_bytes)

    # short steps share a row, but not more of them than can be told apart
    row_bytes = min(longest(SCALED_ROW_BYTES[0]), SCALED_ROW_BYTES[1])
    return Scale(row_bytes, min(WIDTH / longest(row_bytes), MAX_BYTE_WIDTH))


def scale_bar(scale: Scale) -> str:
    """A bar as long as a round number of bytes on maps of a scale."""
    byte_width = scale.width(scale.row_bytes)
    nbytes = 1 << max(0, int(log2(MAX_BAR / byte_width)))
    width = nbytes * byte_width
    bar = _rect(1, 6, width, height=6, attributes=f'fill="var(--ink)" data-bytes="{nbytes}"')
    words = f"{nbytes:,} byte{'s' * (nbytes > 1)}"
    return _sized(bar + _text(width + 10, 14, words), 20, MAX_BAR + 140)


def role_colours(layout: PoolLayout) -> dict[str, str]:
    roles = dict.fromkeys(region.role for region in layout.regions)
    return {role: SHADES[n % len(SHADES)] for n, role in enumerate(roles)}


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
    buffer = item.buffers[0]
    words = [f"an item: {item.item_bytes:,} bytes, every {buffer.item_stride:,}"]
    if item.unclaimed:
        words.append(f"{item.unclaimed_name}: {item.unclaimed:,}")
    many = f" in each of {len(item.buffers):,} buffers" if len(item.buffers) > 1 else ""
    words.append(f"items: {buffer.items:,}{many}")
    return "; ".join([*words, space_words(item.space)])


def region_words(item: ItemMap, region: Region) -> str:
    """`k: bfloat16, 256 bytes from 0; head 4-7 of 8, every 256`."""
    words = [f"{item.name(region)}: {region.dtype}, {region.width:,} bytes from {region.offset:,}"]
    words += [f"packing {region.packing}, moved whole"] if region.packing else []
    words += [f"{axis_steps(axis)}, every {axis.stride:,}" for axis in region.axes_by_stride]
    return "; ".join(words)


def _map(item: ItemMap, colours: Colours, scale: Scale = Scale()) -> tuple[str, int]:
    """A map as SVG elements, and its height in pixels."""
    parts: list[str] = []
    y, rows = 4, 0
    for band in item.bands(scale.row_bytes):
        hidden = band.rows - SHOWN - 1 if band.axis and band.rows >= HIDE_FROM else 0
        shown = min(SHOWN, band.rows)
        for number in chain(range(shown), range(shown + hidden, band.rows)):
            start = band.start + number * band.row
            if rows == MAX_ROWS:
                words = f"… bytes {start:,} to {item.item_bytes - 1:,}: too many rows to be drawn"
                return "".join([*parts, _text(LEFT, y + LINE, words, "small")]), y + 2 * LINE
            parts += _row(item, band, number, y, colours=colours, scale=scale)
            y, rows = y + ROW + GAP, rows + 1
            if hidden and number == SHOWN - 1:
                words = f"… {hidden:,} more rows like these, every {band.row:,} bytes: "
                parts.append(_text(LEFT, y + 12, words + band.words(SHOWN, hidden), "small"))
                y += LINE
        y += 2 * GAP
    return "".join(parts), y


def _row(
    item: ItemMap, band: Band, number: int, y: int, *, colours: Colours, scale: Scale
) -> Iterator[str]:
    """A row of a band: its first byte, its boxes, its steps."""
    start, byte_width = band.start + number * band.row, scale.width(band.row)
    yield _text(LEFT - 8, y + ROW - 6, f"{start:,}", "byte")
    boxes = band.boxes(number, MIN_STEP_WIDTH / byte_width)
    for box in boxes:
        paint = 'class="gap"'
        if box.region is not None:
            paint = f'fill="{colours[box.region.role]}"'
        x, width = LEFT + (box.start - start) * byte_width, (box.end - box.start) * byte_width
        cell = f'{paint} data-from="{box.start}" data-to="{box.end}"'
        name = item.name(box.region) if box.region else item.unclaimed_name
        words = ", ".join(filter(None, (name, box.steps)))
        words += f": bytes {box.start:,} to {box.end - 1:,} of the item"
        yield _rect(x, y, width, height=ROW, attributes=cell, tooltip=words)
    x = LEFT + (boxes[-1].end - start) * byte_width + 8
    yield _text(x, y + ROW - 6, band.words(number), "small")


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    if len(words) > MAX_LETTERS:
        words = words[: MAX_LETTERS - 1] + "…"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{text(words)}</text>'


def _rect(
    x: float, y: float, width: float, *, height: float, attributes: str, tooltip: str = ""
) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f"<rect {place} {attributes}><title>{text(tooltip)}</title></rect>"


def _sized(drawing: str, height: int, width: int = LEFT + WIDTH + RIGHT) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{drawing}</svg>'
