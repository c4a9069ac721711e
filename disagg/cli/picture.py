"""A page that draws items of both sides of a hand-off to scale: what travels in the colour of the
prefill rank that sends it, the rest in grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from disagg.cli.compare import Alternatives
from disagg.cli.wire import LinkRates, wire_words
from disagg.contract.hand_off import HandOff
from disagg.plan import TransferPlan
from disagg.plan.runs import Box
from kvpool.layout import Axis, Buffer, Key, PoolLayout, Region
from kvpool.layout.summary import html_table
from kvpool.layout.text import axis_steps, ranges
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.page import asset, legend, page as frame
from kvpool.render.svg import SHADES, common_scale, facts, heading, map_svg, scale_bar

STAYS = "var(--bare)"
MOST_SOURCES = 4  # drawn for a decode rank
Sources = tuple[int, ...]
"""Prefill ranks that send the same bytes of an item: several where each has other positions."""
Travels = dict[Key, list[tuple[Box, int]]]
"""Of each region the steps that travel, of its axes other than `entry`, and who sends them."""
Colours = dict[Sources, str]


@dataclass(frozen=True, slots=True)
class Drawing:
    """An item cut into pieces with names of their own, and a colour for each name."""

    item: ItemMap
    paint: dict[str, str]


def page(
    hand_off: HandOff, link: LinkRates = LinkRates(), alternatives: Alternatives | None = None
) -> str:
    """Of decode ranks that are filled alike the first, and prefill ranks that it reads from."""
    senders = _senders(hand_off)
    colours = {sources: shade(number) for number, sources in enumerate(senders)}
    keys = [(colours[sources], _sender_words(hand_off, sources)) for sources in senders]
    sections = [*_sections(hand_off, colours)]
    scale = common_scale([part.item for part in sections if isinstance(part, Drawing)])
    body = [
        "<p>One item of each kind, all to one scale. Bytes that travel have the colour of the "
        "prefill rank that sends them, on both sides.</p>",
        *(f"<p>{escape(words)}</p>" for words in wire_words(hand_off, link)),
        legend([*keys, (STAYS, "stays")]),
        scale_bar(scale),
    ]
    for part in sections:
        if isinstance(part, Drawing):
            part = f'<div class="map">{map_svg(part.item, part.paint, scale)}</div>'
        body.append(part)
    if alternatives is not None:
        body += _compared(alternatives)
    title = f"{hand_off.prefill.words()} to {hand_off.decode.words()}"
    return frame(title, *body, style=asset("map.css") + asset("table.css"))


def shade(number: int) -> str:
    """A colour for each number."""
    if number < len(SHADES):
        return SHADES[number]
    return f"hsl({137.5 * number % 360:.1f} 60% 55%)"


def travelling(plan: TransferPlan, source: int | None = None) -> Travels:
    """What travels of the regions of a source rank, or of the destination."""
    boxes: Travels = {}
    for part in plan.parts:
        if source in (None, part.source):
            for key in part.keys:
                boxes.setdefault(key, []).append((part.box, part.source))
    return boxes


def pieces(region: Region, boxes: Sequence[tuple[Box, int]]) -> list[tuple[Region, Sources]]:
    """A region cut into parts that travel, with who sends them, and parts that stay."""
    parts: list[tuple[Region, Sources]] = [(region, ())]
    for box, source in boxes:
        smaller: list[tuple[Region, Sources]] = []
        for part, senders in parts:
            inside, outside = _cut(part, box)
            if inside is not None:
                smaller.append((inside, tuple(sorted({*senders, source}))))
            smaller += [(rest, senders) for rest in outside]
        parts = smaller
    return parts


def _cut(region: Region, box: Box) -> tuple[Region | None, list[Region]]:
    """What of a region is in a box, and the rest, one axis after the other."""
    outside: list[Region] = []
    for name, low, high in box:
        axis = region.axis(name)
        if axis is None or (axis.start >= low and axis.stop <= high):
            continue
        if axis.stop <= low or axis.start >= high:
            return None, [*outside, region]
        if axis.start < low:
            outside.append(_steps(region, axis, axis.start, low))
        if axis.stop > high:
            outside.append(_steps(region, axis, high, axis.stop))
        region = _steps(region, axis, max(low, axis.start), min(high, axis.stop))
    return region, outside


def _steps(region: Region, axis: Axis, low: int, high: int) -> Region:
    """The steps `low` to `high` of an axis of a region, as a region."""
    axes = [replace(a, start=low, size=high - low) if a is axis else a for a in region.axes]
    offset = region.offset + (low - axis.start) * axis.stride
    return replace(region, offset=offset, axes=tuple(axes))


def _senders(hand_off: HandOff) -> list[Sources]:
    """Who sends something to a decode rank that is drawn: each alone, then those that share."""
    senders = set[Sources]()
    for (first, *_), _ in hand_off.explained:
        plan = hand_off.plans[first]
        for key, boxes in travelling(plan).items():
            senders |= {(source,) for _, source in boxes}
            senders |= {sources for _, sources in pieces(plan.dest.region_by_key[key], boxes)}
    return sorted(senders - {()}, key=lambda sources: (len(sources), sources))


def _sender_words(hand_off: HandOff, sources: Sources) -> str:
    words = hand_off.prefill.words(sources)
    return f"{words}, each of other positions" if len(sources) > 1 else words


def _sections(hand_off: HandOff, colours: Colours) -> Iterator[str | Drawing]:
    for (first, *others), explanation in hand_off.explained:
        plan, name = hand_off.plans[first], escape(hand_off.decode.words([first]))
        alike = f" Filled alike: {hand_off.decode.words(others)}." if others else ""
        yield f"<h2>{name}</h2>"
        yield f"<p>{escape(explanation.title)}.{escape(alike)}</p>"
        yield f'<div class="map runs">{explanation.html()}</div>'
        sources = plan.contributors()
        for source in sources[:MOST_SOURCES]:
            yield f"<h3>{escape(hand_off.prefill.words([source]))}</h3>"
            yield from _rank(plan.sources[source], travelling(plan, source), colours)
        if sources[MOST_SOURCES:]:
            more = hand_off.prefill.words(sources[MOST_SOURCES:])
            yield f"<p>And {escape(more)}, which are not drawn.</p>"
        yield f"<h3>{name}</h3>"
        yield from _rank(plan.dest, travelling(plan), colours)


def _compared(alternatives: Alternatives) -> Iterator[str]:
    yield f"<h2>Alternatives</h2><p>{escape(alternatives.title)}</p>"
    yield f'<div class="map compared">{html_table(alternatives.rows())}</div>'
    yield from (f"<p>{escape(words)}</p>" for words in alternatives.words())


def _rank(layout: PoolLayout, travels: Travels, colours: Colours) -> Iterator[str | Drawing]:
    for item in _items(layout, travels):
        paint, parts, words = dict[str, str](), list[Region](), list[str]()
        for region in item.regions:
            for part, sources in pieces(region, travels.get(region.key, ())):
                # of another name, so that it has another colour
                sender = f"from rank {ranges(sources)}" if sources else "stays"
                drawn_as = replace(part, role=f"{part.role}, {sender}")
                parts.append(drawn_as)
                paint[drawn_as.role] = colours[sources] if sources else STAYS
                if sources:
                    axes = ", ".join(axis_steps(axis) for axis in part.axes_by_stride)
                    words.append(f"{part.role} ({axes or 'whole'})")
        if words:
            yield f"<p><b>{escape(heading(item))}</b></p>"
            yield f"<p>{escape(facts(item))}</p><p>travels: {escape('; '.join(words))}</p>"
            yield Drawing(replace(item, regions=tuple(parts)), paint)
        else:
            yield f"<p><b>{escape(heading(item))}</b>: nothing travels</p>"


def _items(layout: PoolLayout, travels: Travels) -> Iterator[ItemMap]:
    """Maps of the items of a layout, of layers apart that travel and that do not."""
    alike: dict[object, tuple[list[Buffer], list[Region]]] = {}
    for buffer in layout.buffers:
        inside = [region for region in layout.regions if region.buffer == buffer.name]
        moves = tuple((r.owner, r.role, tuple(travels.get(r.key, ()))) for r in inside)
        buffers, regions = alike.setdefault(moves, ([], []))
        buffers.append(buffer)
        regions += inside
    for buffers, regions in alike.values():
        yield from item_maps(replace(layout, buffers=tuple(buffers), regions=tuple(regions)))
