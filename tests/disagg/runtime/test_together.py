"""Small rooms that are ready in one turn are read together, and fail each for itself."""

from __future__ import annotations

import pytest

from disagg import KVPoll, TransferError
from disagg.engines.local import LocalEngine
from disagg.runtime.reads import lane
from kvpool import RequestAddress, Span
from tests import oracle
from tests.disagg.stepping import stepped

ROOMS = 5


class Reads(LocalEngine):
    """Keeps what was posted; a read of an item of `wrong` fails."""

    def __init__(self):
        super().__init__()
        self.posted, self.wrong = [], []

    def read(self, peer, batch):
        self.posted.append(batch.runs)
        at = batch.dst.tolist()
        if any(pointer in item for pointer in at for item in self.wrong):
            raise TransferError("injected")
        return super().read(peer, batch)


def table(page, tokens):
    return RequestAddress(tokens, {"kv": Span([1 + page])})


def where(pool, page):
    (buffer, *rest) = pool.layout.buffers
    return [
        range(b.base + (1 + page) * b.item_stride, b.base + (2 + page) * b.item_stride)
        for b in (buffer, *rest)
    ]


@pytest.fixture
def both():
    with stepped(decode_engine=Reads()) as made:
        source, dest = made.pools
        oracle.blank(dest)
        yield made, made.decode.engine, source, dest


def hand_over(made, source, sizes):
    """Rooms 0, 1, ... of as many tokens, each in a page of its own; decode's pages in reverse."""
    tables = [(table(n, size), table(ROOMS - n, size)) for n, size in enumerate(sizes)]
    oracle.blank(source, oracle.SOURCE)
    for room, (given, into) in enumerate(tables):
        oracle.write(source, given, range(given.num_tokens))
        made.decode.receive(room, into)
        made.prefill.send(room, given)
    return tables


def until_ended(made):
    made.step_until(lambda: all(made.decode.poll(room).ended for room in range(ROOMS)))


def test_rooms_that_are_ready_together_are_one_read(both):
    made, engine, source, dest = both
    sizes = [16, 3, 16, 1, 9]
    tables = hand_over(made, source, sizes)
    until_ended(made)
    assert len(engine.posted) == 1
    oracle.assert_holds(dest, tables[0][1], also=[into for _, into in tables[1:]])
    for room, size in enumerate(sizes):
        assert made.decode.poll(room) is KVPoll.Success
        metrics = made.decode.metrics(room)
        assert metrics.bytes_moved == metrics.bytes_bound >= size * 2 * (16 + 8) * 2
        assert metrics.chunks == 1


def test_one_of_them_that_fails_is_the_only_one(both):
    made, engine, source, dest = both
    engine.wrong = where(dest, ROOMS - 2)
    tables = hand_over(made, source, [16] * ROOMS)
    until_ended(made)
    assert "injected" in made.decode.failure(2).reason and not made.decode.reading(2)
    first, *others = [into for room, (_, into) in enumerate(tables) if room != 2]
    oracle.assert_holds(dest, first, also=others)
    assert engine.posted[0] == sum(engine.posted[1:]) and len(engine.posted) == 1 + ROOMS


def test_where_no_fence_is_sure_all_fail_with_what_failed_first(both):
    made, engine, source, dest = both
    engine.wrong, close = where(dest, ROOMS - 2), engine.fence
    hand_over(made, source, [16] * ROOMS)

    def unsure(peer, timeout=None):
        raise TransferError("it cannot be told whether bytes still land")

    engine.fence = unsure
    until_ended(made)
    engine.fence = close
    for room in range(ROOMS):
        assert made.decode.poll(room) is KVPoll.Failed
        assert "injected" in made.decode.failure(room).reason and made.decode.reading(room)
        with pytest.raises(ValueError, match="wait for its reads"):
            made.decode.forget(room)


def test_where_a_fence_takes_too_long_all_fail_and_keep_their_pages_until_it_is_passed():
    with stepped(decode_engine=Reads(), decode_read_timeout=2.0) as made:
        source, dest = made.pools
        engine = made.decode.engine
        engine.wrong, fence = where(dest, ROOMS - 2), engine.fence
        engine.fence = lambda peer, timeout=None: False
        hand_over(made, source, [16] * ROOMS)
        made.step(20)
        assert not any(made.decode.poll(room).ended for room in range(ROOMS))
        made.clock.now += 2.1
        made.step(5)
        for room in range(ROOMS):
            assert made.decode.poll(room) is KVPoll.Failed and made.decode.reading(room)
            assert "injected" in made.decode.failure(room).reason
        engine.fence = fence
        made.step(5)
        assert not any(made.decode.reading(room) for room in range(ROOMS))


def test_of_a_peer_that_is_stuck_all_fail_at_once():
    with stepped(decode_read_timeout=2.0) as made:
        source, _ = made.pools
        made.decode.engine.poll = lambda transfer: False
        hand_over(made, source, [16] * ROOMS)
        made.step(20)
        for _ in range(5):
            made.clock.now += 0.4
            made.step(2)
        assert not any(made.decode.poll(room).ended for room in range(ROOMS))
        made.clock.now += 0.4
        made.step(5)
        assert all(made.decode.poll(room) is KVPoll.Failed for room in range(ROOMS))
        assert "The peer is stuck" in made.decode.failure(0).reason


def test_a_room_that_is_aborted_before_is_left_out(both):
    made, source = both[0], both[2]
    hand_over(made, source, [16] * ROOMS)
    made.prefill.step()  # it has published them
    begin = lane.Lane._begin

    def abort_first(self):
        made.decode.abort(1, "the user went away.")
        return begin(self)

    lane.Lane._begin = abort_first
    try:
        until_ended(made)
    finally:
        lane.Lane._begin = begin
    states = [made.decode.poll(room) for room in range(ROOMS)]
    assert states == [KVPoll.Failed if room == 1 else KVPoll.Success for room in range(ROOMS)]


def test_large_reads_are_posted_alone(both, monkeypatch):
    made, engine, source, dest = both
    monkeypatch.setattr(lane, "SMALL_BYTES", 16 * 2 * (16 + 8) * 2 - 1)
    tables = hand_over(made, source, [16, 3, 3, 16, 3])
    until_ended(made)
    assert len(engine.posted) == 4  # the second and third together
    oracle.assert_holds(dest, tables[0][1], also=[into for _, into in tables[1:]])
