"""The memory map of an item as SVG elements: rows of bytes to scale, regions in colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree.ElementTree import Element, SubElement

from kvpool.layout import Region
from kvpool.render.memory_map import HIDE_FROM, SHOWN, ByteRange, ItemMap, span
from kvpool.render.page import FONT

LEFT, WIDTH, RIGHT = 92, 880, 178  # pixels: offsets, the map, steps at least
ROW, GAP, LINE = 20, 2, 16
MAX_ROWS = 512  # of one map
MAX_BYTE_WIDTH = 8.0  # pixels
LONG = 300.0  # pixels of a box whose label is at its left
MIN_STEP_WIDTH = 6.0  # pixels of a step that gets its own box
DIGIT, LETTER = 6.1, 6.6  # pixels of a character
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


def drawn(item: ItemMap, colours: dict[Region, str]) -> tuple[Element, float, float]:
    """The map of an item, and its width and height in pixels."""
    group = Element("g")
    row, y, left = item.row_bytes, 0.0, MAX_ROWS
    width = float(LEFT + WIDTH + RIGHT)
    scale = min(WIDTH / row, MAX_BYTE_WIDTH)
    for rows in item.rows():
        y += LINE
        first, last = SHOWN if rows.count >= HIDE_FROM else (rows.count, 0)
        hidden = rows.count - first - last
        left -= first + last
        if left < 0:
            words = f"… bytes {rows.start:,} to {item.item_bytes - 1:,}: too many unlike rows"
            add(group, "text", words, x=LEFT, y=y, class_="small")
            break
        for number in [*range(first), *range(rows.count - last, rows.count)]:
            start = rows.start + number * row
            if hidden and number == first + hidden:
                y = _elided(group, item, start - hidden * row, hidden, y)
            pieces = list(
                item.pieces(start, min(start + row, item.item_bytes), MIN_STEP_WIDTH / scale)
            )
            line = _Line(group=group, item=item, pieces=pieces, colours=colours, scale=scale, y=y)
            if number == 0:
                line.ruler()
            line.cells()
            line.words(number)
            width = max(width, line.width)
            y += ROW + GAP
    return group, width, y


def add(parent: Element, tag: str, text: str = "", /, **attributes: object) -> Element:
    """A new child; `text_anchor=` and `class_=` are attributes `text-anchor` and `class`."""
    written = {
        name.rstrip("_").replace("_", "-"): f"{value:.3f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
    }
    child = SubElement(parent, tag, written)
    child.text = text
    return child


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A row of a map, `y` pixels from its top."""

    group: Element
    item: ItemMap
    pieces: Sequence[ByteRange]
    colours: dict[Region, str]
    scale: float
    y: float

    def cells(self) -> None:
        """Draws the boxes, the offset of the first byte, and the steps."""
        middle, start = self.y + ROW - 6, self.pieces[0].start
        place = {"x": LEFT - 8, "y": middle, "text_anchor": "end"}
        add(self.group, "text", f"{start:,}", class_="byte", **place)
        for piece in self.pieces:
            box = {"x": self.x(piece.start), "y": self.y, "height": ROW}
            box["width"] = (piece.end - piece.start) * self.scale
            bytes_ = {"data_from": piece.start, "data_to": piece.end}
            paint = {"class_": "gap"}
            if piece.first is not None:
                paint = {"class_": "cell", "fill": self.colours[piece.first.region]}
            self.tooltip(add(self.group, "rect", **paint, **box, **bytes_), piece)
        add(self.group, "text", self.steps, x=self.right, y=middle, class_="small")

    @property
    def steps(self) -> str:
        """What the row holds."""
        regions = [piece for piece in self.pieces if piece.first]
        return span(regions[0].first, regions[-1].last) if regions else self.item.unclaimed_name

    @property
    def right(self) -> float:
        """The x coordinate of these words."""
        return self.x(self.pieces[-1].end) + 8

    @property
    def width(self) -> float:
        """Pixels from the left to their end."""
        return self.right + len(self.steps) * DIGIT

    def words(self, number: int) -> None:
        """Labels: regions and their bytes in the first row, steps in the second."""
        for parts in self.runs():
            first = parts[0].first
            fill = self.colours[first.region] if first else None
            style = "inside light" if fill in DARK else "inside" if fill else "inside bare"
            labels: list[tuple[ByteRange, ByteRange, tuple[str, str]]] = []
            if number == 0:
                name, nbytes = self.name(parts[0]), parts[-1].end - parts[0].start
                labels = [(parts[0], parts[-1], (f"{name}: {nbytes:,} bytes", name))]
            elif number == 1 and len(parts) > 1:
                steps = map(_step, parts)
                labels = [(p, p, (step, step.rpartition(" ")[2])) for p, step in zip(parts, steps)]
            for size in range(2):
                rooms = [(b.end - a.start) * self.scale - 6 for a, b, _ in labels]
                if all(len(t[size]) * LETTER <= room for (_, _, t), room in zip(labels, rooms)):
                    for low, high, texts in labels:
                        paint = {"class_": style, **self.place(low.start, high.end)}
                        paint |= {"stroke": fill} if fill else {}
                        add(self.group, "text", texts[size], **paint)
                    break

    def place(self, start: int, end: int) -> dict[str, object]:
        """Where the label of some bytes is: in their middle, or at the left of a long box, where it
        is seen first.
        """
        if (end - start) * self.scale > LONG:
            return {"x": self.x(start) + 6, "y": self.y + ROW - 6}
        middle = self.x((start + end) / 2)
        return {"x": middle, "y": self.y + ROW - 6, "text_anchor": "middle"}

    def tooltip(self, box: Element, piece: ByteRange) -> None:
        """Adds a box's tooltip."""
        name = ", ".join(filter(None, (self.name(piece), span(piece.first, piece.last))))
        add(box, "title", f"{name}: bytes {piece.start:,} to {piece.end - 1:,} of the item")

    def ruler(self) -> None:
        """Marks offsets where regions begin and the row ends, where there is room."""
        starts = [
            part[0].start
            for part in self.runs()
            if part[0].first or (part[-1].end - part[0].start) * self.scale > MIN_STEP_WIDTH
        ]
        free = 0.0
        for byte in [*starts, self.pieces[-1].end]:
            x, half = self.x(byte), len(f"{byte:,}") * DIGIT / 2
            if x - half > free:
                add(self.group, "line", x1=x, x2=x, y1=self.y - 4, y2=self.y, class_="tick")
                place = {"x": x, "y": self.y - 5, "text_anchor": "middle"}
                add(self.group, "text", f"{byte:,}", class_="byte", **place)
                free = x + half + 2

    def x(self, byte: float) -> float:
        """The x coordinate of a byte of the item."""
        return LEFT + (byte - self.pieces[0].start) * self.scale

    def runs(self) -> list[list[ByteRange]]:
        """Adjacent boxes of one region, grouped."""
        return [list(part) for _, part in groupby(self.pieces, self.name)]

    def name(self, piece: ByteRange) -> str:
        """The region's name, or what is between regions."""
        return self.item.name(piece.first.region) if piece.first else self.item.unclaimed_name


def _step(piece: ByteRange) -> str:
    """The finest step that contains all of a box, as text."""
    words = span(piece.first, piece.last).split(", ")
    return next((word for word in reversed(words) if "-" not in word), "")


def _elided(group: Element, item: ItemMap, start: int, count: int, y: float) -> float:
    row = item.row_bytes
    pieces = item.pieces(start, start + row, MIN_STEP_WIDTH)
    first_piece = next((piece for piece in pieces if piece.first), None)
    last = item.find(first_piece.start + (count - 1) * row) if first_piece else None
    words = f"… {count:,} more rows like these, every {row:,} bytes"
    steps = span(first_piece.first, last) if first_piece else item.unclaimed_name
    text = f"{words}: {steps}" if steps else words
    add(group, "text", text, x=LEFT, y=y + LINE - 5, class_="small")
    return y + LINE + 4
