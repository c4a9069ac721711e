"""Reads by way of a buffer: what arrives, how few runs are asked for, and when a buffer is free."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import TransferError, create_engine
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch
from disagg.runtime.staging import (
    MIN_STAGING,
    NUM_BUFFERS,
    StagingBuffers,
    coalesce,
    cut,
    staging_buffers,
)
from kvpool import MHAPool
from kvpool.layout import Buffer, PoolLayout, Space
from tests import oracle
from tests.disagg.engines.shared_device import installed, there
from tests.disagg.runtime.sides import moves, request
from tests.disagg.waiting import until

TOKENS = 75
MHA = {"num_kv_heads": 4, "head_dim": 8, "dtype": "bf16", "num_pages": 12, "page_size": 16}
LAYERS = {"layers": range(3)}


class Joining(LocalEngine):
    """Counts what it is asked for, and wants long runs."""

    run_overhead_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []

    def read(self, peer, batch):
        self.runs.append(batch.runs)
        return super().read(peer, batch)


# parts


@st.composite
def batches(draw):
    """Runs that tile stretches of the source, in any order, to places that have none in common."""
    lengths, sources, offset = [], [], 0
    for _ in range(draw(st.integers(1, 6))):
        offset += draw(st.integers(0, 9))
        for length in draw(st.lists(st.integers(1, 7), min_size=1, max_size=20)):
            sources.append(offset)
            lengths.append(length)
            offset += length
    for _ in range(draw(st.integers(0, 3))):  # what goes to two places
        again = draw(st.integers(0, len(sources) - 1))
        sources.append(sources[again])
        lengths.append(lengths[again])
    order = draw(st.permutations(range(len(sources))))
    dst, ends = [0] * len(order), 0
    for number in draw(st.permutations(range(len(order)))):
        dst[number] = ends
        ends += lengths[number] + draw(st.integers(0, 3))
    columns = ([column[number] for number in order] for column in (sources, dst, lengths))
    return CopyBatch(*(np.array(column, dtype=np.int64) for column in columns))


def memory_without(*foreign):
    """A layout of the bytes from 0 on, but for a few that are somebody else's."""
    edges = [-1, *sorted(foreign), 1 << 20]
    buffers = [
        Buffer(f"b{low}", "s", low + 1, high - low - 1, high - low - 1, 1, padding=True)
        for low, high in pairwise(edges)
        if high > low + 1
    ]
    return PoolLayout(tuple(buffers), (), (Space("s", "slot", reserved=0),), 0)


def cheapest(runs, foreign, run_overhead_bytes, total):
    """The cost of the better of two ways to join sorted runs, counted one by one."""
    ways = []
    for most in (0, run_overhead_bytes):
        count, read = 1, runs[0][1]
        for (before, size), (src, nbytes) in pairwise(runs):
            gap = src - before - size
            if 0 <= gap <= most and not any(before <= byte < src for byte in foreign):
                read += gap
            else:
                count += 1
            read += nbytes
        ways.append((count * run_overhead_bytes + read + total, read))
    return min(cost for cost, read in ways if read <= 8 * total)


@settings(max_examples=200)
@given(
    batches(),
    st.sets(st.integers(0, 60), max_size=3),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_parts_bring_every_byte_once_within_their_bounds(
    batch, more, run_overhead_bytes, max_bytes, max_runs
):
    runs = sorted(zip(batch.src.tolist(), batch.nbytes.tolist()), key=lambda run: run[0])
    foreign = [byte for byte in more if not any(0 <= byte - src < size for src, size in runs)]
    coalesced = coalesce(batch, memory_without(*foreign), run_overhead_bytes)
    direct = batch.runs * run_overhead_bytes + batch.total
    cost = cheapest(runs, foreign, run_overhead_bytes, batch.total)
    pays = batch.total < batch.runs * run_overhead_bytes and 2 * cost <= direct
    assert (coalesced is not None) is pays
    if coalesced is None:
        return
    assert coalesced.read.runs * run_overhead_bytes + coalesced.read.total + batch.total == cost
    memory = np.random.default_rng(0).integers(0, 256, 2000, dtype=np.uint8)
    expected, written = (np.zeros(4000, dtype=np.uint8) for _ in range(2))
    for src, dst, nbytes in zip(*batch):
        expected[dst : dst + nbytes] = memory[src : src + nbytes]
    for part in cut(coalesced, max_bytes, max_runs):
        buffer = np.zeros(max_bytes, dtype=np.uint8)
        assert 0 < part.read.total <= max_bytes and part.read.runs <= max_runs
        assert part.payload == part.scatter.total <= part.read.total
        for src, dst, nbytes in zip(*part.read):
            assert dst >= 0 and dst + nbytes <= max_bytes
            assert not any(src <= byte < src + nbytes for byte in foreign)
            buffer[dst : dst + nbytes] = memory[src : src + nbytes]
        for src, dst, nbytes in zip(*part.scatter):
            assert nbytes > 0 and src >= 0 and src + nbytes <= part.read.total
            assert not written[dst : dst + nbytes].any()
            written[dst : dst + nbytes] = buffer[src : src + nbytes]
    assert (written == expected).all()


def test_runs_are_joined_by_where_the_source_has_them():
    src = np.arange(64, dtype=np.int64)[::-1] * 256
    batch = CopyBatch(src, np.arange(64) * 1000, np.broadcast_to(np.int64(256), 64))
    coalesced = coalesce(batch, memory_without(), 8192)
    assert [column.tolist() for column in coalesced.read] == [[0], [0], [64 * 256]]
    assert coalesced.scatter.runs == 64 and coalesced.scatter.dst[0] == 63_000
    apart = CopyBatch(src * 4, batch.dst, batch.nbytes)  # one head of four
    assert [column.tolist() for column in coalesce(apart, memory_without(), 8192).read] == [
        [0],
        [0],
        [63 * 1024 + 256],
    ]
    assert coalesce(apart, memory_without(), 512) is None  # what lies between costs as much
    assert coalesce(CopyBatch(src * 10, batch.dst, batch.nbytes), memory_without(), 8192) is None
    between = range(300, 1 << 16, 1024)
    assert coalesce(apart, memory_without(*between), 8192) is None  # it is somebody else's
    none = np.zeros(0, dtype=np.int64)
    assert coalesce(CopyBatch(none, none, none), memory_without(), 8192) is None


# rooms


def hand_over(
    source, dest, engine, rooms=1, tokens=TOKENS, on=lambda layout, memory: layout, **more
):
    """Rooms between endpoints of this process, their memory called `shm` by `on`."""
    source_table, address = request(source, dest, tokens)
    layouts = on(source.layout, "shm:0"), on(dest.layout, "shm:1")
    with (
        PrefillEndpoint(layouts[0], create_engine("local")) as prefill,
        DecodeEndpoint(layouts[1], engine, **more) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        for room in range(rooms):
            oracle.blank(dest)
            moves(prefill, source_table, decode, dest, address, room)
            assert decode.metrics(room).bytes_moved == tokens * dest.bytes_per_token


@pytest.mark.parametrize(("staging", "fewest"), [(MIN_STAGING, False), (0, True)])
def test_other_pages_and_orders_are_read_as_the_source_has_them(staging, fewest):
    source = MHAPool(**LAYERS, **MHA)
    dest = MHAPool(**LAYERS, **{**MHA, "order": "hnd"})
    engine = Joining()
    hand_over(source, dest, engine, rooms=9, staging=staging)  # buffers are used again
    runs_of_heads = 2 * 3 * TOKENS * 4
    assert (sum(engine.runs) == 9 * runs_of_heads) is fewest
    if not fewest:
        assert sum(engine.runs) <= 9 * 2 * 3 * -(-TOKENS // 16)


def test_more_than_a_buffer_comes_in_parts():
    shape = {**MHA, "num_kv_heads": 8, "head_dim": 64, "num_pages": 80, "page_size": 64}
    source, dest = (MHAPool(**LAYERS, **{**shape, "order": order}) for order in ("nhd", "hnd"))
    engine, tokens = Joining(), 4500
    hand_over(source, dest, engine, tokens=tokens, staging=4 << 20)
    assert len(engine.runs) >= tokens * dest.bytes_per_token / (1 << 20)


def test_a_device_scatters_what_came_to_its_memory_before_the_room_succeeds():
    with installed():
        shape = {**LAYERS, **MHA}
        source = MHAPool(**shape, device="shm:0")
        dest = MHAPool(**{**shape, "order": "hnd"}, device="shm:1")
        engine = Joining()
        hand_over(source, dest, engine, rooms=5, on=there)
    assert sum(engine.runs) <= 5 * 2 * 3 * -(-TOKENS // 16)


class Odd(Exception):
    """What a device's binding may raise."""


class Copying:
    """An event of a copy that raises `times` times, and is over then."""

    def __init__(self, times):
        self.times = times

    def query(self):
        self.times -= 1
        if self.times >= 0:
            raise Odd("odd")
        return True


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_an_event_of_a_copy_that_raises_fails_that_read_and_no_other(monkeypatch, times):
    source = MHAPool(**LAYERS, **MHA)
    dest = MHAPool(**LAYERS, **{**MHA, "order": "hnd", "num_pages": 40})
    source_table, bad = request(source, dest, TOKENS)
    good, events, finish = oracle.elsewhere(dest, bad), [Copying(times)], StagingBuffers.finish

    def finished(self, part, buffer):
        finish(self, part, buffer)
        return events.pop() if events else None

    monkeypatch.setattr(StagingBuffers, "finish", finished)
    with (
        PrefillEndpoint(source.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, Joining(), staging=MIN_STAGING) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        prefill.send("waits", oracle.place(source, 5))
        for room, table in (("bad", bad), ("good", good)):
            decode.receive(room, table)
            prefill.send(room, source_table)
            until(decode, lambda: not events)  # of two in flight either may arrive first
        assert decode.wait("bad", 20) is KVPoll.Failed
        assert str(decode.failure("bad")).endswith(": odd")
        assert decode.wait("good", 20) is KVPoll.Success, decode.failure("good")
        for buffer in dest.layout.buffers:
            dest.item_bytes_view(buffer)[bad.spans["kv"].ids.tolist()] = oracle.DEST
        oracle.assert_holds(dest, good)
        if times == 1:  # the copy is over: its pages come back
            until(decode, lambda: not decode.reading("bad"))
        else:  # it may still write
            assert decode.reading("bad")
            assert decode.leases().quarantined == {"kv": 5}


def test_a_stage_is_made_only_where_it_is_of_use():
    layout = MHAPool(**LAYERS, **MHA).layout
    offline = MHAPool(**LAYERS, **MHA, device="meta").layout
    for target, engine, nbytes in (
        (layout, LocalEngine(), MIN_STAGING),  # runs cost it little
        (layout, Joining(), 0),
        (offline, Joining(), MIN_STAGING),  # which shares no memory
        (there(layout, "tpu:0"), Joining(), MIN_STAGING),
    ):
        assert not staging_buffers(target, engine, nbytes).slabs
    assert (
        staging_buffers(layout, Joining(), MIN_STAGING).buffer_bytes == MIN_STAGING // NUM_BUFFERS
    )
    # a device that shares no memory: what is converted goes through buffers, small runs do not
    stage = staging_buffers(offline, Joining(), MIN_STAGING, always=True)
    (part,) = stage.parts(scattered(64), memory_without(), Joining())
    assert stage.buffer_bytes and part.scatter is None
    with pytest.raises(ValueError, match=r"staging=1000: 1,048,576 bytes or more, or 0"):
        DecodeEndpoint(layout, Joining(), staging=1000)


def scattered(count):
    """Adjacent runs, in reverse order."""
    src = np.arange(count) * 256
    return CopyBatch(src, src[::-1], np.full(count, 256))


def test_buffers_that_are_lost_are_not_waited_for():
    stage = staging_buffers(MHAPool(**LAYERS, **MHA).layout, Joining(), MIN_STAGING)
    batch = scattered(64)
    taken = [stage.take_buffer() for _ in range(NUM_BUFFERS)]
    assert len({*taken}) == NUM_BUFFERS and stage.take_buffer() is None
    stage.give(taken.pop())
    stage.mark_lost(NUM_BUFFERS - 1)
    assert stage.take_buffer() is not None and stage.take_buffer() is None
    (part,) = stage.parts(batch, memory_without(), Joining())
    assert part.scatter is not None and part.read.runs == 1
    stage.mark_lost(1)
    with pytest.raises(TransferError, match="all staging memory is held by peers"):
        stage.take_buffer()
    (part,) = stage.parts(batch, memory_without(), Joining())
    assert part.scatter is None and part.read.runs == 64
