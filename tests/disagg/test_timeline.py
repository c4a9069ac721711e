"""The picture of a hand-off in time, of metrics that are set by hand and of a real one."""

from __future__ import annotations

import pytest

from disagg.protocol.metrics import ReadTimes, RoomMetrics
from disagg.protocol.rooms.offered import LayerRange
from disagg.timeline import MAX_CHUNKS, seconds_of, timeline
from kvpool.render.chart import chart_html
from tests.pictures.samples import TOKENS, handed_over


def panel(metrics):
    (found,) = timeline({"r": metrics}).panels
    return found


def marks(row):
    return [(mark.kind, mark.start, mark.end) for mark in row.marks]


def test_every_step_of_a_room_is_a_row_from_its_begin_to_its_end():
    metrics = RoomMetrics(
        bytes_moved=2048,
        asked_seconds=0.5,
        verify_seconds=0.25,
        done_seconds=3.5,
        total_seconds=4.0,
        reads=[
            ReadTimes(source=1, start=0, stop=64, layers=None, ready=1.0, begun=2.0, ended=3.25),
            ReadTimes(source=0, start=64, stop=70, layers=None, ready=1.5, begun=None, ended=2.5),
            ReadTimes(
                source=0,
                start=0,
                stop=64,
                layers=LayerRange("target", 0, 2),
                ready=0.75,
                begun=1.0,
                ended=1.25,
            ),
        ],
        released={0: 3.75, 1: 4.0},
    )
    found = panel(metrics)
    assert found.heading == "r: 2.0 KiB in 4 s" and found.axis.high == 4.0
    assert [row if isinstance(row, str) else (row.name, row.figure) for row in found.rows] == [
        ("prefill is asked", "500 ms"),
        "rank 0",
        ("tokens 0-63, target layers 0 to 1", "500 ms"),
        ("tokens 64-69", "1 s"),
        "rank 1",
        ("tokens 0-63", "2.25 s"),
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
        ReadTimes(source=0, start=0, stop=64, layers=layers, ready=n, begun=n, ended=n + 0.5)
        for n, layers in enumerate(some)
    ]
    (row,) = panel(RoomMetrics(reads=reads, total_seconds=3.0)).rows
    assert (row.name, row.figure) == ("tokens 0-63, in 3 parts", "2.5 s")
    assert [mark.kind for mark in row.marks] == ["thin", "bar"] * 3 + ["tick"] * 3
    assert row.marks[1].tooltip.startswith("target layers 0 to 0: ready at 0 ")


def test_a_room_that_ended_before_anything_was_read_is_drawn():
    assert panel(RoomMetrics(total_seconds=2.0)).rows == []
    assert 'class="plot"' in chart_html(timeline({"r": RoomMetrics()}))


def test_chunks_beyond_what_can_be_read_are_counted():
    reads = [
        ReadTimes(source=0, start=n, stop=n + 1, layers=None, ready=1.0, begun=1.0, ended=2.0)
        for n in range(MAX_CHUNKS + 1200)
    ]
    rows = panel(RoomMetrics(reads=reads, total_seconds=2.0)).rows
    assert len(rows) == MAX_CHUNKS + 1 and rows[-1] == "1,200 more chunks are not drawn"


def test_a_real_hand_off_is_ready_begun_read_and_released_in_this_order():
    metrics = handed_over(ranks=2, chunk=512)
    assert len(metrics.reads) == 8
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
    ("seconds", "like", "words"),
    [
        (2.5, None, "2.5 s"),
        (0.0125, None, "12.5 ms"),
        (12e-6, None, "12 µs"),
        (0.0, 0.02, "0 ms"),
        (0.0005, 2.0, "0.0005 s"),
    ],
)
def test_seconds_are_written_in_a_unit_that_fits(seconds, like, words):
    assert seconds_of(seconds, like) == words
