"""Spans of both sides, recorded by OpenTelemetry, join into the trace of the request."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from disagg import KVPoll
from disagg.protocol.trace_context import EXAMPLE, parent_of, trace_of
from disagg.protocol.versions import PROTOCOL
from tests import oracle
from tests.disagg.runtime.sides import TOKENS, decode_side, joined, prefill_side
from tests.disagg.waiting import until

TRACE, PARENT = int(trace_of(EXAMPLE), 16), int(parent_of(EXAMPLE), 16)
UNSAMPLED = EXAMPLE[:-2] + "00"


@pytest.fixture(scope="module")
def exporter():
    """The provider of a process can be set once, which a document's program may have done."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    exporter = InMemorySpanExporter()
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def spans(exporter):
    exporter.clear()
    return exporter.get_finished_spans


def by_side(endpoint, spans, room, count=2):
    """The spans of a room by side, once there are as many."""

    def of_room():
        return [span for span in spans() if span.attributes["kvpool.room"] == room]

    until(endpoint, lambda: len(of_room()) == count)
    return {span.name.removeprefix("kvpool."): span for span in of_room()}


def names(span):
    return [event.name for event in span.events]


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("first", ["receive", "send"])
def test_both_sides_have_a_span_in_the_trace_of_the_request(spans, first):
    with joined(verify="checksum") as (prefill, offered, decode, dest, table):
        if first == "send":
            prefill.send("r", offered, tokens=range(32), last=False)
        decode.receive("r", table, traceparent=EXAMPLE)
        until(prefill, lambda: prefill.poll("r") is not KVPoll.Bootstrapping)
        if first == "receive":
            prefill.send("r", offered, tokens=range(32), last=False)
        prefill.send("r", offered)
        assert decode.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, table)
        found = by_side(decode, spans, "r")
        metrics = decode.metrics("r")
    for side, span in found.items():
        assert span.context.trace_id == TRACE and span.parent.span_id == PARENT
        assert span.parent.is_remote and span.status.status_code is StatusCode.UNSET
        assert span.attributes["kvpool.tokens"] == TOKENS, side
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert times == sorted(times)
    sent, read = found["prefill"], found["decode"]
    assert read.attributes["kvpool.bytes_moved"] == metrics.bytes_moved > 0
    assert sent.attributes["kvpool.chunks"] == 2 and "kvpool.bytes_moved" not in sent.attributes
    assert seconds(read) == pytest.approx(metrics.total_seconds, abs=1e-6)
    assert names(read) == [
        "first chunk is ready",
        "first read begins",
        "last read ends",
        "all is read and verified",
        "rank 0 of prefill releases",
    ]
    # a room that decode's request opens begins with it
    assert names(sent) == ["decode asks", "all is computed"][first == "receive" :]


def test_a_room_that_fails_says_why(spans):
    with joined() as (prefill, offered, decode, _, table):
        decode.receive("r", table, traceparent=EXAMPLE)
        prefill.send("r", offered, tokens=range(32), last=False)
        until(prefill, lambda: prefill.poll("r") is KVPoll.Transferring)
        prefill.abort("r", "the GPU is on fire")
        assert decode.wait("r", 20) is KVPoll.Failed
        failure = decode.failure("r")
        found = by_side(decode, spans, "r")
    assert str(failure) == "prefill: the GPU is on fire"
    for span in found.values():
        assert span.context.trace_id == TRACE and span.parent.span_id == PARENT
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == str(failure)
        about = span.attributes["kvpool.failure.side"], span.attributes["kvpool.failure.kind"]
        assert about == ("prefill", "abort")


def test_a_room_without_a_trace_has_no_span_and_one_that_is_not_sampled_neither(spans):
    with joined() as (prefill, offered, decode, _, table):
        for room, traceparent in (("a", None), ("b", UNSAMPLED), ("c", EXAMPLE)):
            decode.receive(room, table, traceparent=traceparent)
            prefill.send(room, offered)
            assert decode.wait(room, 20) is prefill.wait(room, 20) is KVPoll.Success
        by_side(decode, spans, "c")
    assert {span.attributes["kvpool.room"] for span in spans()} == {"c"}


def test_a_prefill_of_protocol_7_has_no_span_and_the_room_works(spans, monkeypatch):
    monkeypatch.setattr("disagg.runtime.endpoint.PROTOCOL", 7)
    with prefill_side() as (prefill, offered):
        monkeypatch.setattr("disagg.runtime.endpoint.PROTOCOL", PROTOCOL)
        with decode_side() as (decode, dest, table):
            link = decode.connect([prefill.address], timeout=20)
            assert link.hellos[0].protocol == 7
            decode.receive("r", table, traceparent=EXAMPLE)
            prefill.send("r", offered)
            assert decode.wait("r", 20) is prefill.wait("r", 20) is KVPoll.Success
            oracle.assert_holds(dest, table)
            found = by_side(decode, spans, "r", count=1)
    assert found.keys() == {"decode"}


def test_a_provider_that_raises_does_not_touch_the_room(spans, monkeypatch, caplog):
    def broken(*_args, **_more):
        raise OSError("no collector")

    with joined() as (prefill, offered, decode, dest, table):
        monkeypatch.setattr("opentelemetry.sdk.trace.Tracer.start_span", broken)
        decode.receive("r", table, traceparent=EXAMPLE)
        prefill.send("r", offered)
        assert decode.wait("r", 20) is prefill.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, table)
    assert not spans()
    assert "no span of room 'r': no collector" in caplog.text


def test_one_line_of_debugging_on_each_side_has_the_same_ids(caplog):
    caplog.set_level(logging.DEBUG, "disagg")

    def lines():
        texts = [record.getMessage() for record in caplog.records if record.name == "disagg"]
        said = [json.loads(text) for text in texts if text.startswith("{")]
        return [line for line in said if line["event"] == "room succeeded"]

    with joined() as (prefill, offered, decode, _, table):
        decode.receive("r", table, traceparent=EXAMPLE)
        prefill.send("r", offered)
        assert decode.wait("r", 20) is prefill.wait("r", 20) is KVPoll.Success
        until(decode, lambda: len(lines()) == 2)
        moved = decode.metrics("r").bytes_moved
    first, second = sorted(lines(), key=lambda line: line["side"])
    assert (first["side"], second["side"]) == ("decode", "prefill")
    for line in (first, second):
        assert (line["room"], line["trace"], line["tokens"]) == ("r", trace_of(EXAMPLE), TOKENS)
        assert first["generation"] == second["generation"]
    assert first["bytes_moved"] == moved and {"wire", "done"} <= first["times"].keys()


UNCONFIGURED = """
import sys
from tests.disagg.runtime.sides import joined
from disagg.protocol.trace_context import EXAMPLE
with joined() as (prefill, offered, decode, dest, table):
    decode.receive("r", table, traceparent=EXAMPLE)
    prefill.send("r", offered)
    assert str(decode.wait("r", 20)) == str(prefill.wait("r", 20)) == "Success"
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_a_process_that_records_no_spans_does_not_import_opentelemetry():
    run = subprocess.run([sys.executable, "-c", UNCONFIGURED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
