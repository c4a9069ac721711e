"""Hand-offs in time, as a picture of rooms' metrics.

write_chart(timeline({"a room": endpoint.metrics(room)}), Path("room.html"))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from disagg.protocol.metrics import ReadTimes, RoomMetrics
from kvpool.layout.units import human
from kvpool.render.chart import COLOURS, Chart, ChartRow, Kind, Mark, Panel, linear_axis

MAX_CHUNKS = 100
"""Chunks of a room that are drawn; the others are counted."""
READY, WAITS, READS, OTHER = COLOURS[1], COLOURS[9], COLOURS[0], COLOURS[2]
LEGEND: tuple[tuple[Kind, str, str], ...] = (
    ("tick", READY, "chunk ready"),
    ("thin", WAITS, "waits for its turn"),
    ("bar", READS, "is read"),
    ("bar", OTHER, "other steps"),
)


def timeline(rooms: Mapping[str, RoomMetrics], title: str = "Hand-off in time") -> Chart:
    """Rooms by name. In each a row for each chunk of each rank of prefill, from the room's request
    on, and one for each step before and after. Layers of a chunk that are read one by one share its
    row.
    """
    note = "Figures: how long a chunk took from being ready to its last byte, and each other step."
    return Chart(title, LEGEND, [_panel(name, room) for name, room in rooms.items()], [note])


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
    axis = linear_axis(end, lambda seconds: seconds_of(seconds, end))
    return Panel(f"{name}: {moved}", axis, rows)


def seconds_of(seconds: float, like: float | None = None) -> str:
    """`0.0125` as `12.5 ms`; in the unit in which `like` is written."""
    size = seconds if like is None else like
    scale, unit = (1.0, "s") if size >= 1.0 else (1e3, "ms") if size >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"


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
        words += f" to {seconds_of(read.ended)}"
        marks.append(Mark("thin", read.ready, begun, WAITS, words))
        if read.begun is not None:
            marks.append(Mark("bar", begun, read.ended, READS, words))
    marks += [Mark("tick", read.ready, read.ready, READY) for read in reads]
    return ChartRow(name, seconds_of(max(read.ended for read in reads) - first.ready), marks)


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
    return ChartRow(name, seconds_of(ended - begun), [Mark("bar", begun, ended, OTHER, words)])
