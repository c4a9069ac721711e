"""A span of each room, in the trace of its request, by OpenTelemetry (docs/traces.md).

Prefill and decode each record one, both of them children of the request's `traceparent`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from disagg.log import log
from disagg.protocol.metrics import RoomMetrics, RoomSpan
from disagg.protocol.trace_context import flags_of, parent_of, trace_of

TRACER = "kvpool"


def record_span(room: RoomSpan) -> None:
    """Records the span of a room that has ended now, in the provider of this process, if it has
    one. What that raises is logged: the hand-off is over, and others go on.
    """
    # a process that records spans has imported it, to name the provider; no other has to pay
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return
    try:
        _record(api, room)
    except Exception as error:
        log.warning("no span of room %r: %s", room.facts["room"], error)


def _record(api: Any, room: RoomSpan) -> None:
    parent = api.SpanContext(
        trace_id=int(trace_of(room.traceparent), 16),
        span_id=int(parent_of(room.traceparent), 16),
        is_remote=True,
        trace_flags=api.TraceFlags(flags_of(room.traceparent)),
    )
    context = api.set_span_in_context(api.NonRecordingSpan(parent))
    ended = time.time_ns()
    begun = ended - _nanoseconds(room.metrics.total_seconds)
    tracer = api.get_tracer(TRACER)
    span = tracer.start_span(f"kvpool.{room.side}", context=context, start_time=begun)
    if span.is_recording():
        span.set_attributes({f"kvpool.{name}": value for name, value in attributes(room)})
        for name, seconds in steps(room):
            span.add_event(name, timestamp=begun + _nanoseconds(seconds))
        if room.failure is not None:
            span.set_status(api.StatusCode.ERROR, str(room.failure))
    span.end(end_time=ended)


def attributes(room: RoomSpan) -> Iterator[tuple[str, str | int | float]]:
    """Of its span, without their prefix."""
    metrics, failure = room.metrics, room.failure
    yield from room.facts.items()
    yield "chunks", metrics.chunks
    if room.side == "decode":  # prefill does not see what is read
        yield "runs", metrics.runs
        yield "bytes_moved", metrics.bytes_moved
    for name, seconds in metrics.times().items():
        yield f"{name}_seconds", seconds
    if failure is not None:
        yield "failure.side", failure.side
        yield "failure.kind", failure.kind


def steps(room: RoomSpan) -> list[tuple[str, float]]:
    """What has happened to it since it was opened, and how many seconds after that."""
    metrics = room.metrics
    events = _prefill_steps(metrics) if room.side == "prefill" else _decode_steps(metrics)
    later = [event for event in events if event[1] > 0]
    return sorted(later, key=lambda event: event[1])


def _prefill_steps(metrics: RoomMetrics) -> Iterator[tuple[str, float]]:
    yield "decode asks", metrics.asked_seconds
    yield "all is computed", metrics.done_seconds


def _decode_steps(metrics: RoomMetrics) -> Iterator[tuple[str, float]]:
    yield "prefill is asked", metrics.asked_seconds
    yield "first chunk is ready", metrics.wait_seconds
    begun = [read.begun for read in metrics.reads if read.begun is not None]
    yield "first read begins", min(begun, default=0.0)
    yield "last read ends", max((read.ended for read in metrics.reads), default=0.0)
    yield "all is read and verified", metrics.done_seconds
    for source, seconds in sorted(metrics.released.items()):
        yield f"rank {source} of prefill releases", seconds


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
