"""Layouts as SVG: a memory map, to scale, of one item of each kind.

A map is read like a hex dump: rows of equal length, regions in colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from textwrap import wrap
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvpool.layout import PoolLayout, Region
from kvpool.layout.sentences import axis_steps, steps
from kvpool.render.memory_map import ByteRange, ItemMap, item_maps, span
from kvpool.render.page import FONT, THEME, add
from kvpool.render.text import space_words

LEFT, WIDTH, RIGHT = 92, 880, 178  # pixels: offsets, the map, steps at least
ROW, GAP, LINE = 20, 2, 16
MAX_ROWS = 512  # of one map
SHOWN = 3, 1  # first and last rows of a group of equal ones
HIDE_FROM = 7  # rows in a group
MAX_BYTE_WIDTH = 8.0  # pixels
MIN_STEP_WIDTH = 6.0  # pixels of a step that gets its own box
DIGIT, LETTER = 6.1, 6.6  # pixels of a character
HEAD_LETTER, HEAD_LINE = 10.5, 22  # of a heading
# light: a role's values; dark: its scales
HUES = (
    ("#a6cee3", "#1f78b4"),
    ("#b2df8a", "#33a02c"),
    ("#fdcb8a", "#d95f02"),
    ("#cab2d6", "#6a3d9a"),
    ("#fbb4b9", "#c51b8a"),
    ("#99d8c9", "#00796b"),
    ("#fff099", "#8c6d1f"),
    ("#d9c2a7", "#7f4f24"),
)
SHADES = [shade for shades in zip(*HUES) for shade in shades]  # all light ones first
DARK = {dark for _, dark in HUES}
STYLE = f"""
svg text {{ font: 12px {FONT}; fill: var(--ink); }}
svg .head {{ font-size: 16px; font-weight: 600; }}
svg .byte {{ font: 10px ui-monospace, Menlo, "DejaVu Sans Mono", monospace; fill: var(--quiet); }}
svg .small {{ font-size: 10px; fill: var(--quiet); }}
svg .inside {{ font-size: 11px; fill: #222; stroke-width: 4; paint-order: stroke;
  pointer-events: none; }}
svg .light {{ fill: #fff; }} svg .bare {{ fill: var(--ink); stroke: var(--bare); }}
svg rect {{ stroke: var(--seam); stroke-width: 0.75; }}
svg rect.gap {{ fill: url(#gap); stroke: var(--stripe); stroke-width: 0.5; }}
svg rect.found {{ stroke: var(--found); stroke-width: 2; }}
svg .tick {{ stroke: var(--stripe); stroke-width: 0.75; }}
svg .paper {{ fill: var(--paper); stroke: none; }}
"""


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
        drawing = _Drawing(item, colours)
        drawing.group.set("transform", f"translate(0 {top + 4:.1f})")
        root.append(drawing.group)
        right, top = _legend(root, item, colours, top + 4 + drawing.height)
        width, top = max(width, drawing.width, right), top + 20
    return _sized(root, width, top)


def map_svg(item: ItemMap, colours: Mapping[Region, str]) -> str:
    """The map of an item, to stand in a page that has `hatching` once."""
    drawing = _Drawing(item, colours)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.append(drawing.group)
    return _sized(root, drawing.width, drawing.height)


def hatching() -> str:
    """What fills bytes that no region claims, for all maps of a page."""
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", style="position:absolute;height:0")
    root.append(_hatch())
    return ElementTree.tostring(root, encoding="unicode")


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
    # `c4.latent.scale` as `latent`
    roots = {
        region: region.role.removesuffix(".scale").rpartition(".")[2]
        for item in maps
        for region in item.regions
    }
    hue = {root: HUES[n % len(HUES)] for n, root in enumerate(dict.fromkeys(roots.values()))}
    paints = []
    for item in maps:
        colours = [hue[roots[r]][r.role.endswith(".scale")] for r in item.regions]
        if len(set(colours)) < len(colours):
            colours = [SHADES[n % len(SHADES)] for n in range(len(colours))]
        paints.append(dict(zip(item.regions, colours)))
    return paints


class _Drawing:
    """The map of an item as SVG elements in `group`, and its size in pixels."""

    def __init__(self, item: ItemMap, colours: Mapping[Region, str]) -> None:
        self._item, self._colours = item, colours
        self.group, self.width, self.height = Element("g"), float(LEFT + WIDTH + RIGHT), 0.0
        self._row, self._start = item.row_bytes, 0
        self._scale = min(WIDTH / self._row, MAX_BYTE_WIDTH)
        left = MAX_ROWS
        for first_byte, count in item.rows():
            self.height += LINE
            first, last = SHOWN if count >= HIDE_FROM else (count, 0)
            left -= first + last
            if left < 0:
                words = f"… bytes {first_byte:,} to {item.item_bytes - 1:,}: too many unlike rows"
                self._text(words, LEFT, self.height, class_="small")
                break
            for number in range(first):
                self._draw(first_byte + number * self._row, number)
            if hidden := count - first - last:
                self._elided(first_byte + first * self._row, hidden)
            for number in range(count - last, count):
                self._draw(first_byte + number * self._row, number)

    def _draw(self, start: int, number: int) -> None:
        """Row `number` of a group: its boxes, the offset of its first byte, what it holds."""
        self._start = start
        end = min(start + self._row, self._item.item_bytes)
        pieces = [*self._item.pieces(start, end, MIN_STEP_WIDTH / self._scale)]
        # adjacent boxes of one region
        runs = [list(part) for _, part in groupby(pieces, self._name)]
        if number == 0:
            self._ruler(runs)
        self._text(f"{start:,}", LEFT - 8, self.height + ROW - 6, class_="byte", text_anchor="end")
        for piece in pieces:
            self._box(piece)
        for run in runs if number < 2 else ():
            self._labels(run, number == 0)
        regions = [piece for piece in pieces if piece.first]
        words = self._item.unclaimed_name
        if regions:
            words = span(regions[0].first, regions[-1].last)
        right = self._x(end) + 8
        self._text(words, right, self.height + ROW - 6, class_="small")
        self.width = max(self.width, right + len(words) * DIGIT)
        self.height += ROW + GAP

    def _box(self, piece: ByteRange) -> None:
        paint = {"class_": "gap"}
        if piece.first is not None:
            paint = {"class_": "cell", "fill": self._colours[piece.first.region]}
        width = (piece.end - piece.start) * self._scale
        place = {"x": self._x(piece.start), "y": self.height, "width": width, "height": ROW}
        box = add(self.group, "rect", **paint, **place, data_from=piece.start, data_to=piece.end)
        name = ", ".join(filter(None, (self._name(piece), span(piece.first, piece.last))))
        add(box, "title", f"{name}: bytes {piece.start:,} to {piece.end - 1:,} of the item")

    def _labels(self, run: Sequence[ByteRange], first_row: bool) -> None:
        """The region and its bytes in the first row of a group, steps in the second, as far as they
        fit into all boxes of a run.
        """
        nbytes, steps = run[-1].end - run[0].start, [*map(_step, run)]
        texts = [f"{self._name(run[0])}: {nbytes:,} bytes"], [self._name(run[0])]
        boxes = [(run[0].start, run[-1].end)]
        if not first_row:
            texts = steps, [step.rpartition(" ")[2] for step in steps]
            boxes = [(piece.start, piece.end) for piece in run] if len(run) > 1 else []
        rooms = [(end - low) * self._scale - 6 for low, end in boxes]
        for words in texts:
            if all(len(text) * LETTER <= room for text, room in zip(words, rooms)):
                fill = self._colours[run[0].first.region] if run[0].first else None
                style = "inside light" if fill in DARK else "inside" if fill else "inside bare"
                paint = {"class_": style, **({"stroke": fill} if fill else {})}
                for (low, _), text in zip(boxes, words):
                    self._text(text, self._x(low) + 3, self.height + ROW - 6, **paint)
                return

    def _ruler(self, runs: Sequence[Sequence[ByteRange]]) -> None:
        """Marks offsets where regions begin and the row ends, where there is room."""
        free = 0.0
        starts = [
            run[0].start
            for run in runs
            if run[0].first or (run[-1].end - run[0].start) * self._scale > MIN_STEP_WIDTH
        ]
        for byte in [*starts, runs[-1][-1].end]:
            x, half = self._x(byte), len(f"{byte:,}") * DIGIT / 2
            if x - half > free:
                y = self.height
                add(self.group, "line", x1=x, x2=x, y1=y - 4, y2=y, class_="tick")
                self._text(f"{byte:,}", x, y - 5, class_="byte", text_anchor="middle")
                free = x + half + 2

    def _elided(self, start: int, count: int) -> None:
        """Says that `count` rows from a byte are left out."""
        text = f"… {count:,} more rows like these, every {self._row:,} bytes"
        pieces = self._item.pieces(start, start + self._row, MIN_STEP_WIDTH)
        piece = next((piece for piece in pieces if piece.first), None)
        words = self._item.unclaimed_name
        if piece is not None:
            last = self._item.runs.find(piece.start + (count - 1) * self._row)
            words = span(piece.first, last)
        self.height += LINE + 4
        self._text(f"{text}: {words}" if words else text, LEFT, self.height - 9, class_="small")

    def _text(self, words: str, x: float, y: float, **attributes: str) -> None:
        add(self.group, "text", words, x=float(x), y=float(y), **attributes)

    def _x(self, byte: int) -> float:
        """The x coordinate of a byte of the row that is drawn."""
        return LEFT + (byte - self._start) * self._scale

    def _name(self, piece: ByteRange) -> str:
        """The region's name, or what is between regions."""
        return self._item.name(piece.first.region) if piece.first else self._item.unclaimed_name


def _step(piece: ByteRange) -> str:
    """The finest step that contains all of a box, as text."""
    words = span(piece.first, piece.last).split(", ")
    return next((word for word in reversed(words) if "-" not in word), "")


def _sized(root: Element, width: float, height: float) -> str:
    root.set("width", f"{width:.0f}")
    root.set("height", f"{height:.0f}")
    root.set("viewBox", f"0 0 {width:.0f} {height:.0f}")
    return ElementTree.tostring(root, encoding="unicode")


def _hatch() -> Element:
    """The fill pattern of bytes that no region claims."""
    defs = Element("defs")
    turned = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = add(defs, "pattern", id="gap", width=6, height=6, **turned)
    add(pattern, "rect", width=6, height=6, style="fill:var(--bare);stroke:none")
    add(pattern, "line", x1=0, y1=0, x2=0, y2=6, style="stroke:var(--stripe);stroke-width:2")
    return defs


def _lines(root: Element, text: str, y: float, **style: str) -> float:
    """Writes lines of text below `y`; where they end, in pixels."""
    letter, height = (HEAD_LETTER, HEAD_LINE) if style else (LETTER, LINE)
    for line in wrap(text, int((WIDTH + RIGHT) / letter)):
        y += height
        add(root, "text", line, x=LEFT, y=y, **style)
    return y + 4


def _legend(
    root: Element, item: ItemMap, colours: Mapping[Region, str], y: float
) -> tuple[float, float]:
    """Draws a table of regions at `y`; its right and its bottom, in pixels."""
    rows: list[tuple[str, ...]] = [
        ("region", "dtype", "first byte", "cell", "axes: steps and strides in bytes")
    ]
    for region in item.regions:
        axes = "; ".join(axes_words(region)) or "none"
        cell = f"{region.width:,} bytes"
        rows.append((item.name(region), region.dtype, f"{region.offset:,}", cell, axes))
    widths = [LETTER * max(map(len, column)) + 20 for column in zip(*rows)]
    columns = list(accumulate(widths, initial=LEFT + 20.0))
    paints: list[dict[str, str]] = [{}, *({"fill": colours[region]} for region in item.regions)]
    if item.unclaimed:
        rows.append((f"{item.unclaimed_name}: {item.unclaimed:,} bytes in all",))
        paints.append({"class_": "gap"})
    for paint, row in zip(paints, rows):
        if paint:
            add(root, "rect", x=LEFT, y=y + 4, width=14, height=14, **paint)
        for x, text in zip(columns, row):
            style = {} if paint else {"class_": "small"}
            add(root, "text", text, x=x, y=y + LINE, **style)
        y += LINE + 4
    return columns[-1], y
