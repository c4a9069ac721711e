"""Hand-offs in time, as a picture of rooms' metrics.

write_chart(timeline({"a room": endpoint.metrics(room)}), Path("room.html"))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from disagg.protocol.metrics import ReadTimes, RoomMetrics
from kvpool.layout.units import human
from kvpool.render.chart import (
    COLOURS,
    STRIPES,
    Chart,
    ChartAxis,
    ChartRow,
    Kind,
    Mark,
    Panel,
    linear_axis,
)

MAX_CHUNKS = 100
"""Chunks of a room that are drawn; the others are counted."""
MOST_GAPS = 8
"""The longest stretches in which nothing happens, which the axis of a room leaves out."""
LEAST_GAP, MARGIN = 0.1, 0.02
"""Of the time in which something happens: shorter stretches are drawn, and so much on both sides
of those that are left out.
"""
LEAST_SHOWN = 1e-4  # of a room's time
READY, WAITS, READS, OTHER = COLOURS[1], COLOURS[9], COLOURS[0], COLOURS[2]
LEGEND: tuple[tuple[Kind, str, str], ...] = (
    ("tick", READY, "chunk ready"),
    ("thin", WAITS, "waits for its turn"),
    ("bar", READS, "is read"),
    ("bar", OTHER, "other steps"),
)
EMPTY: tuple[Kind, str, str] = ("bar", STRIPES, "time left out: nothing happens")
Stretches = list[tuple[float, float]]


def timeline(rooms: Mapping[str, RoomMetrics], title: str = "Hand-off in time") -> Chart:
    """Rooms by name. In each a row for each chunk of each rank of prefill, from the room's request
    on, and one for each step before and after. Layers of a chunk that are read one by one share its
    row.
    """
    note = (
        "Figures: a chunk's bytes, how long it took from being ready to its last byte, and bytes a "
        "second while it was read; how long each other step took."
    )
    panels = [_panel(name, room) for name, room in rooms.items()]
    legend = [*LEGEND, EMPTY] if any(panel.axis.gaps for panel in panels) else LEGEND
    return Chart(title, legend, panels, [note])


def _panel(name: str, metrics: RoomMetrics) -> Panel:
    end = max(metrics.total_seconds, *(read.ended for read in metrics.reads), 1e-6)
    reads = sorted(metrics.reads, key=attrgetter("source", "start", "stop", "ready"))
    chunks = [list(chunk) for _, chunk in groupby(reads, attrgetter("source", "start", "stop"))]
    drawn, hidden = chunks[:MAX_CHUNKS], len(chunks[MAX_CHUNKS:])
    rows: list[ChartRow | str] = []
    if metrics.asked_seconds:
        rows += [_step("prefill is asked", 0.0, metrics.asked_seconds)]
    many = len({read.source for read in metrics.reads} | metrics.released.keys()) > 1
    for source, of_rank in groupby(drawn, lambda reads: reads[0].source):
        rows += [f"rank {source}"] if many else []
        rows += map(_chunk, of_rank)
    rows += [f"{hidden:,} more chunks are not drawn"] if hidden else []
    rows += _last_steps(metrics, many)
    moved = f"{human(metrics.bytes_moved)} in {seconds_of(metrics.total_seconds)}"
    return Panel(f"{name}: {moved}", _axis(metrics, rows, end), rows)


def _axis(metrics: RoomMetrics, rows: Sequence[ChartRow | str], end: float) -> ChartAxis:
    """From the room's request to its end, without long stretches in which nothing happens."""
    marks = [mark for row in rows if not isinstance(row, str) for mark in row.marks]
    reads = [(read.ready, read.ended) for read in metrics.reads]  # those that are not drawn too
    busy = merged([*reads, *((mark.start, mark.end) for mark in marks)])
    # so that times of nearly nothing leave something to be drawn
    seconds = max(sum(stop - start for start, stop in busy), LEAST_SHOWN * end)
    bounds = [0.0, *(time for stretch in busy for time in stretch), end]
    gaps = sorted(zip(bounds[::2], bounds[1::2]), key=lambda gap: gap[0] - gap[1])
    margin = MARGIN * seconds
    left_out = [
        (start + margin, stop - margin)
        for start, stop in sorted(gaps[:MOST_GAPS])
        if busy and stop - start > LEAST_GAP * seconds
    ]
    shown = end - sum(stop - start for start, stop in left_out)
    return linear_axis(end, lambda value: _tick_words(value, end, shown), left_out)


def merged(stretches: Stretches) -> Stretches:
    """The same time as stretches apart from one another, in order."""
    apart: Stretches = []
    for start, stop in sorted(stretches):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(stop, apart[-1][1])
        else:
            apart.append((start, stop))
    return apart


def seconds_of(seconds: float) -> str:
    """`0.0125` as `12.5 ms`."""
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.3g} {unit}"


def _tick_words(seconds: float, end: float, shown: float) -> str:
    """In the unit of an axis's `end`, with the digits that tell ticks apart where so much of the
    time is `shown`: 10.005 s and 10.01 s.
    """
    scale, unit = _unit(end)
    return f"{round(seconds * scale, max(0, math.ceil(1 - math.log10(shown * scale)))):.9g} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time is written, and how many of it are a second."""
    return (1.0, "s") if seconds >= 1.0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _chunk(reads: Sequence[ReadTimes]) -> ChartRow:
    first = reads[0]
    name = f"tokens {first.start:,}-{first.stop - 1:,}" if first.start < first.stop else "states"
    if len(reads) > 1:
        name += f", in {len(reads):,} parts"
    elif first.layers is not None:
        name += f", {first.layers}"
    marks: list[Mark] = []
    for read in reads:
        begun = read.ended if read.begun is None else read.begun
        layers = f"{read.layers}: " if read.layers else ""
        words = f"{layers}ready at {seconds_of(read.ready)}, "
        words += "not read" if read.begun is None else f"read from {seconds_of(begun)}"
        words += f" to {seconds_of(read.ended)}: {human(read.nbytes)}"
        marks.append(Mark(kind="thin", start=read.ready, end=begun, colour=WAITS, tooltip=words))
        if read.begun is not None:
            marks.append(Mark(kind="bar", start=begun, end=read.ended, colour=READS, tooltip=words))
    marks += [Mark("tick", read.ready, read.ready, READY) for read in reads]
    took = seconds_of(max(read.ended for read in reads) - first.ready)
    nbytes = sum(read.nbytes for read in reads)
    turns = merged([(read.begun, read.ended) for read in reads if read.begun is not None])
    seconds = sum(stop - start for start, stop in turns)
    rate = f", {human(nbytes / seconds)}/s" if seconds else ""
    return ChartRow(name, f"{human(nbytes)} in {took}{rate}", marks)


def _last_steps(metrics: RoomMetrics, many: bool) -> Iterator[ChartRow]:
    """What follows the last read, of a room that has come so far."""
    if metrics.done_seconds and metrics.verify_seconds:
        begun = max((read.ended for read in metrics.reads), default=0.0)
        yield _step("digests are compared", begun, metrics.done_seconds)
    for source, seconds in sorted(metrics.released.items()):
        name = f"rank {source} releases" if many else "prefill releases"
        yield _step(name, metrics.done_seconds, seconds)


def _step(name: str, begun: float, ended: float) -> ChartRow:
    words = f"from {seconds_of(begun)} to {seconds_of(ended)}"
    return ChartRow(
        name,
        seconds_of(ended - begun),
        [Mark(kind="bar", start=begun, end=ended, colour=OTHER, tooltip=words)],
    )
