"""The picture of a hand-off in time, of metrics that are set by hand and of a real one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from disagg.protocol.metrics import ReadTimes, RoomMetrics
from disagg.protocol.rooms.offered import LayerRange
from disagg.timeline import MAX_CHUNKS, MOST_GAPS, seconds_of, timeline
from kvpool.render.chart import chart_html
from tests.pictures.samples import TOKENS, handed_over


def panel(metrics):
    (found,) = timeline({"r": metrics}).panels
    return found


def marks(row):
    return [(mark.kind, mark.start, mark.end) for mark in row.marks]


def read_of(tokens, ready, begun, ended, *, source=0, layers=None, nbytes=1):
    """A read of positions, at these times."""
    return ReadTimes(
        source=source,
        start=tokens.start,
        stop=tokens.stop,
        layers=layers,
        nbytes=nbytes,
        ready=ready,
        begun=begun,
        ended=ended,
    )


def test_every_step_of_a_room_is_a_row_from_its_begin_to_its_end():
    metrics = RoomMetrics(
        bytes_moved=2048,
        asked_seconds=0.5,
        verify_seconds=0.25,
        done_seconds=3.5,
        total_seconds=4.0,
        reads=[
            read_of(range(64), 1.0, 2.0, 3.25, source=1, nbytes=1280),
            read_of(range(64, 70), 1.5, None, 2.5, nbytes=0),
            read_of(range(64), 0.75, 1.0, 1.25, layers=LayerRange("target", 0, 2), nbytes=768),
        ],
        released={0: 3.75, 1: 4.0},
    )
    found = panel(metrics)
    assert found.heading == "r: 2.0 KiB in 4 s" and found.axis.high == 4.0
    assert [row if isinstance(row, str) else (row.name, row.figure) for row in found.rows] == [
        ("prefill is asked", "500 ms"),
        "rank 0",
        ("tokens 0-63, target layers 0 to 1", "768 B in 500 ms, 3.0 KiB/s"),
        ("tokens 64-69", "0 B in 1 s"),
        "rank 1",
        ("tokens 0-63", "1.2 KiB in 2.25 s, 1.0 KiB/s"),
        ("digests are compared", "250 ms"),
        ("rank 0 releases", "250 ms"),
        ("rank 1 releases", "500 ms"),
    ]
    drawn = [marks(row) for row in found.rows if not isinstance(row, str)]
    assert drawn == [
        [("bar", 0.0, 0.5)],
        [("thin", 0.75, 1.0), ("bar", 1.0, 1.25), ("tick", 0.75, 0.75)],
        [("thin", 1.5, 2.5), ("tick", 1.5, 1.5)],
        [("thin", 1.0, 2.0), ("bar", 2.0, 3.25), ("tick", 1.0, 1.0)],
        [("bar", 3.25, 3.5)],
        [("bar", 3.5, 3.75)],
        [("bar", 3.5, 4.0)],
    ]


def test_layers_of_a_chunk_share_its_row():
    some = [LayerRange("target", n, n + 1) for n in range(3)]
    reads = [
        read_of(range(64), n, n, n + 0.5, layers=layers, nbytes=1024)
        for n, layers in enumerate(some)
    ]
    (row,) = panel(RoomMetrics(reads=reads, total_seconds=3.0)).rows
    assert (row.name, row.figure) == ("tokens 0-63, in 3 parts", "3.0 KiB in 2.5 s, 2.0 KiB/s")
    assert [mark.kind for mark in row.marks] == ["thin", "bar"] * 3 + ["tick"] * 3
    assert row.marks[1].tooltip.startswith("target layers 0 to 0: ready at 0 ")


def test_bytes_a_second_are_of_the_time_in_which_any_part_was_read():
    reads = [read_of(range(64), 0.0, begun, begun + 2.0, nbytes=3 << 20) for begun in (1.0, 2.0)]
    (row,) = panel(RoomMetrics(reads=reads, total_seconds=4.0)).rows
    assert row.figure == "6.0 MiB in 4 s, 2.0 MiB/s"  # read from 1 to 4, ready at 0


def test_time_in_which_nothing_happens_is_left_out_and_marked():
    # prefill computes a chunk for ten seconds, which is read within 20 ms
    reads = [
        read_of(range(start, start + 64), start, start + 0.005, start + 0.02) for start in (10, 20)
    ]
    metrics = RoomMetrics(reads=reads, total_seconds=20.02)
    axis = panel(metrics).axis
    assert [(round(start), round(stop)) for start, stop in axis.gaps] == [(0, 10), (10, 20)]
    for read in reads:  # 20 ms of 40 are nearly half of what is drawn
        assert axis.at(read.ended) - axis.at(read.ready) > 40
    assert [words for _, words in axis.ticks if words] == [
        *("9.999 s", "10.01 s", "19.999 s", "20.01 s", "20.02 s")
    ]
    text = chart_html(timeline({"r": metrics}))
    places = re.findall(r'<i class="gap" style="left:([\d.]+)%;width:([\d.]+)%', text)
    ends = [float(left) + float(width) for left, width in places]
    assert ends == pytest.approx([axis.at(stop) for _, stop in axis.gaps], abs=0.02)
    assert text.count("time left out: nothing happens") == 1


def test_all_time_is_drawn_where_something_always_happens_or_nothing_does():
    rest = RoomMetrics(reads=[read_of(range(64), 0.0, 1.0, 2.0)], total_seconds=2.05)
    for metrics in (rest, RoomMetrics(total_seconds=30.0)):
        assert panel(metrics).axis.gaps == []
        assert "time left out" not in chart_html(timeline({"r": metrics}))


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=60), st.sampled_from([0.0, 1e-9, 0.5]))
def test_no_mark_is_in_time_that_is_left_out_and_later_is_further_right(times, seconds):
    reads = [read_of(range(n, n + 1), t, t, t + seconds) for n, t in enumerate(sorted(times))]
    shown = panel(RoomMetrics(reads=reads, total_seconds=1e4 + 1))
    axis = shown.axis
    assert len(axis.gaps) <= MOST_GAPS
    for mark in (mark for row in shown.rows for mark in row.marks):
        assert not any(mark.start < stop and start < mark.end for start, stop in axis.gaps)
    places = [axis.at(value) for value in (0.0, *sorted(times), 1e4 + 1)]
    assert places == sorted(places) and (places[0], places[-1]) == pytest.approx((0.0, 100.0))


def test_a_room_that_ended_before_anything_was_read_is_drawn():
    assert panel(RoomMetrics(total_seconds=2.0)).rows == []
    assert 'class="plot"' in chart_html(timeline({"r": RoomMetrics()}))


def test_chunks_beyond_what_can_be_read_are_counted():
    reads = [read_of(range(n, n + 1), 1.0, 1.0, 2.0) for n in range(MAX_CHUNKS + 1200)]
    rows = panel(RoomMetrics(reads=reads, total_seconds=2.0)).rows
    assert len(rows) == MAX_CHUNKS + 1 and rows[-1] == "1,200 more chunks are not drawn"


def test_a_real_hand_off_is_ready_begun_read_and_released_in_this_order():
    metrics = handed_over(ranks=2, chunk=512)
    assert len(metrics.reads) == 8
    assert sum(read.nbytes for read in metrics.reads) == metrics.bytes_moved > 0
    for read in metrics.reads:
        assert 0 < read.ready <= read.begun <= read.ended <= metrics.done_seconds
    for rank in range(2):
        chunks = sorted((r.start, r.stop) for r in metrics.reads if r.source == rank)
        assert chunks == [(n, min(n + 512, TOKENS)) for n in range(0, TOKENS, 512)]
    assert sorted(metrics.released) == [0, 1]
    assert max(metrics.released.values()) == metrics.total_seconds > metrics.done_seconds
    (found,) = timeline({"r": metrics}).panels
    assert len(found.rows) == 2 * (1 + 4 + 1) + 1


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (12e-6, "12 µs"), (0.0, "0 µs")]
)
def test_seconds_are_written_in_a_unit_that_fits(seconds, words):
    assert seconds_of(seconds) == words
