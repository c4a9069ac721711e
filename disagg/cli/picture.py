"""A page that draws items of both sides of a hand-off: what travels in colour, the rest in grey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from disagg.contract.hand_off import HandOff
from disagg.plan import TransferPlan
from disagg.plan.runs import Box
from kvpool.layout import Axis, Buffer, Key, PoolLayout, Region
from kvpool.layout.sentences import axis_steps
from kvpool.render.memory_map import ItemMap, item_maps
from kvpool.render.page import asset, legend, page as frame
from kvpool.render.svg import SHADES, facts, heading, map_svg

STAYS = "var(--bare)"
MOST_SOURCES = 4  # drawn for a decode rank
Travels = dict[Key, list[Box]]
"""Of each region the steps that travel, of its axes other than `entry`."""
Colours = dict[tuple[str, str], str]  # by owner and role


def page(hand_off: HandOff) -> str:
    """Of decode ranks that are filled alike the first, and prefill ranks that it reads from."""
    parts = (part for plan in hand_off.plans.values() for part in plan.parts)
    names = dict.fromkeys((owner, role) for part in parts for owner, _, role in part.keys)
    colours = {name: SHADES[n % len(SHADES)] for n, name in enumerate(names)}
    keys = [(colour, " ".join(name)) for name, colour in colours.items()]
    return frame(
        f"{hand_off.prefill.words()} to {hand_off.decode.words()}",
        "<p>One item of each kind, in rows of equal length. Bytes that travel have the colour of "
        "their role, the same on both sides.</p>",
        legend([*keys, (STAYS, "stays")]),
        *_sections(hand_off, colours),
        style=asset("map.css"),
    )


def travelling(plan: TransferPlan, source: int | None = None) -> Travels:
    """What travels of the regions of a source rank, or of the destination."""
    boxes: Travels = {}
    for part in plan.parts:
        if source in (None, part.source):
            for key in part.keys:
                boxes.setdefault(key, []).append(part.box)
    return boxes


def pieces(region: Region, boxes: Sequence[Box]) -> Iterator[tuple[Region, bool]]:
    """A region cut into parts that travel and parts that stay, with which."""
    left = [region]
    for box in boxes:
        rest: list[Region] = []
        for part in left:
            inside, outside = _cut(part, box)
            rest += outside
            if inside is not None:
                yield inside, True
        left = rest
    yield from ((part, False) for part in left)


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


def _sections(hand_off: HandOff, colours: Colours) -> Iterator[str]:
    for (first, *others), explanation in hand_off.explained:
        plan, name = hand_off.plans[first], escape(hand_off.decode.words([first]))
        alike = f" Filled alike: {hand_off.decode.words(others)}." if others else ""
        extent = f"{explanation.nbytes:,} bytes of a request of {hand_off.tokens:,} tokens."
        yield f"<h2>{name}</h2>"
        yield f"<p>{extent}{escape(alike)}</p>"
        sources = plan.contributors()
        for source in sources[:MOST_SOURCES]:
            yield f"<h3>{escape(hand_off.prefill.words([source]))}</h3>"
            yield from _rank(plan.sources[source], travelling(plan, source), colours)
        if sources[MOST_SOURCES:]:
            more = hand_off.prefill.words(sources[MOST_SOURCES:])
            yield f"<p>And {escape(more)}, which are not drawn.</p>"
        yield f"<h3>{name}</h3>"
        yield from _rank(plan.dest, travelling(plan), colours)


def _rank(layout: PoolLayout, travels: Travels, colours: Colours) -> Iterator[str]:
    for item in _items(layout, travels):
        paint, parts, words = dict[str, str](), list[Region](), list[str]()
        for region in item.regions:
            for part, moves in pieces(region, travels.get(region.key, ())):
                # of another name, so that it has another colour
                drawn_as = part if moves else replace(part, role=f"{part.role}, stays")
                parts.append(drawn_as)
                paint[drawn_as.role] = colours[part.owner, part.role] if moves else STAYS
                if moves:
                    axes = ", ".join(axis_steps(axis) for axis in part.axes_by_stride)
                    words.append(f"{part.role} ({axes or 'whole'})")
        if words:
            yield f"<p><b>{escape(heading(item))}</b></p>"
            yield f"<p>{escape(facts(item))}</p><p>travels: {escape('; '.join(words))}</p>"
            yield f'<div class="map">{map_svg(replace(item, regions=tuple(parts)), paint)}</div>'
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
