"""How reads are posted: a long one in parts, small rooms that are ready in one turn together, and
others side by side. Each room fails for itself.
"""

from __future__ import annotations

from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, TransferError
from disagg.engines.base import engine_class
from disagg.engines.local import LocalEngine
from disagg.runtime import reader, reads
from kvpool import MHAPool, RequestAddress, Span
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import items_of, prefill_process, request
from tests.disagg.stepping import stepped

TOKENS = 150
MHA = {"num_kv_heads": 4, "head_dim": 64, "dtype": "bf16", "num_pages": 24, "page_size": 16}
LAYERS = {"layers": range(3)}
ROOMS = 5
ROOM_BYTES = 16 * 2 * (16 + 8) * 2
"""Of a room of one page: layers, elements and bytes of each."""
FAILED, SUCCESS = KVPoll.Failed, KVPoll.Success


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chunk_of_many_runs_is_one_read(engine):
    posted = []

    class Counting(engine_class(engine)):
        def read(self, peer, batch):
            posted.append(batch.runs)
            return super().read(peer, batch)

    dest = MHAPool(**LAYERS, **MHA)
    address = oracle.place(dest, TOKENS, seed=99)
    oracle.blank(dest)
    with (
        prefill_process(
            engine=engine, build=partial(MHAPool, **LAYERS, **MHA), tokens=TOKENS
        ) as source,
        DecodeEndpoint(dest.layout, Counting(), staging=0) as decode,
    ):
        decode.connect([source.address], timeout=60)
        decode.receive("r1", address)
        source.ask("r1")
        assert decode.wait("r1", 60) is SUCCESS, decode.failure("r1")
        oracle.assert_holds(dest, address)
    assert len(posted) == 1 and posted[0] > 20


class Gate(LocalEngine):
    """A part arrives for each of `allowed`; `in_flight` are those that have not."""

    def __init__(self, parts_in_flight):
        super().__init__()
        self.max_bytes, self.parts_in_flight = 64 << 10, parts_in_flight
        self.allowed = self.posted = 0
        self.arrived = []

    def read(self, peer, batch):
        self.posted += 1
        return super().read(peer, batch)

    def poll(self, transfer):
        if not any(landed is transfer for landed in self.arrived):
            if not self.allowed:
                return False
            self.allowed -= 1
            self.arrived.append(transfer)
        while not super().poll(transfer):  # it does arrive, whatever the clock says
            pass
        return True

    @property
    def in_flight(self):
        return self.posted - len(self.arrived)


@pytest.mark.parametrize("parts_in_flight", [1, 4])
def test_a_read_may_take_long_as_long_as_its_parts_arrive(parts_in_flight):
    source, dest = (MHAPool(**LAYERS, **MHA) for _ in range(2))
    source_table, into = request(source, dest, TOKENS)
    engine = Gate(parts_in_flight)
    patient = {"prefill_peer_timeout": 3600.0, "decode_peer_timeout": 3600.0}
    with stepped(source, dest, decode_engine=engine, decode_read_timeout=10.0, **patient) as pair:
        began = pair.clock.now
        for room in ("good", "stuck"):
            pair.decode.receive(room, into)
            pair.prefill.send(room, source_table)
            pair.step_until(lambda: engine.in_flight == parts_in_flight)
            arrived = len(engine.arrived)
            while not pair.decode.poll(room).ended:
                pair.clock.now += 2.4  # a longer pause counts as no time of the read
                stuck = room == "stuck" and len(engine.arrived) > arrived + 2
                engine.allowed = 0 if stuck else 1
                pair.step(50)
                assert engine.in_flight <= parts_in_flight
            if room == "good":
                assert pair.decode.poll(room) is SUCCESS, pair.decode.failure(room)
                assert pair.clock.now - began > 10  # the time-out
                oracle.assert_holds(dest, into)
                oracle.blank(dest)
        assert pair.decode.poll("stuck") is FAILED
        assert "nothing has arrived for 12.0 s" in str(pair.decode.failure("stuck"))


class Reads(LocalEngine):
    """Keeps what was posted. While it is not `open`, nothing arrives; read number `bad` fails then,
    and a read of an item of `wrong` at once.
    """

    open, bad = True, None

    def __init__(self):
        super().__init__()
        self.posted, self.transfers, self.wrong = [], [], []

    def read(self, peer, batch):
        self.posted.append(batch.runs)
        pointers = batch.dst.tolist()
        if any(pointer in item for pointer in pointers for item in self.wrong):
            raise TransferError("injected")
        self.transfers.append(super().read(peer, batch))
        return self.transfers[-1]

    def poll(self, transfer):
        if not self.open:
            return False
        if self.bad is not None and transfer is self.transfers[self.bad]:
            raise TransferError("injected")
        return super().poll(transfer)


def table(page, tokens):
    return RequestAddress(tokens, {"kv": Span([1 + page])})


@pytest.fixture
def both():
    with stepped(decode_engine=Reads()) as pair:
        source, dest = pair.pools
        oracle.blank(dest)
        yield pair, pair.decode.engine, source, dest


def begin(pair, sizes=(16,) * ROOMS, salted=False):
    """Rooms 0, 1, ... of as many tokens, each in a page of its own; decode's pages in reverse.
    Returns decode's block tables.
    """
    source, _ = pair.pools
    tables = [(table(n, size), table(ROOMS - n, size)) for n, size in enumerate(sizes)]
    oracle.blank(source, oracle.SOURCE)
    for room, (offered, into) in enumerate(tables):
        oracle.write(source, offered, range(offered.num_tokens), salt=room if salted else 0)
        pair.decode.receive(room, into)
        pair.prefill.send(room, offered)
    return [into for _, into in tables]


def states(pair):
    """How all rooms have ended."""
    pair.step_until(lambda: all(pair.decode.poll(room).ended for room in range(ROOMS)))
    return [pair.decode.poll(room) for room in range(ROOMS)]


def all_but(room):
    """The states of rooms of which one has failed."""
    return [FAILED if each == room else SUCCESS for each in range(ROOMS)]


@pytest.mark.parametrize("bad", [None, 0, 3, ROOMS - 1])
def test_rooms_that_are_read_side_by_side_fail_alone(both, monkeypatch, bad):
    pair, engine, _, dest = both
    monkeypatch.setattr(reads, "SMALL_BYTES", 0)
    engine.open, engine.bad = False, bad
    tables = begin(pair, salted=True)
    pair.step_until(lambda: len(engine.posted) == ROOMS)  # before any has arrived
    engine.open = True
    assert states(pair) == all_but(bad)
    pair.step_until(lambda: not any(pair.decode.reading(room) for room in range(ROOMS)))
    for room in set(range(ROOMS)) - {bad}:
        assert oracle.holds(dest, tables[room], salt=room), f"room {room}"


def test_reads_in_flight_together_are_bounded_by_bytes(both, monkeypatch):
    pair, engine, *_ = both
    monkeypatch.setattr(reads, "SMALL_BYTES", 0)
    engine.open, engine.max_bytes = False, 2 * ROOM_BYTES
    begin(pair)
    pair.step(50)
    assert len(engine.posted) in (2, 3)
    engine.open = True
    assert states(pair) == all_but(None)


def test_rooms_that_are_ready_together_are_one_read(both):
    pair, engine, _, dest = both
    sizes = [16, 3, 16, 1, 9]
    tables = begin(pair, sizes)
    assert states(pair) == all_but(None)
    assert len(engine.posted) == 1
    oracle.assert_holds(dest, tables[0], also=tables[1:])
    for room, size in enumerate(sizes):
        metrics = pair.decode.metrics(room)
        assert metrics.bytes_moved == metrics.bytes_bound >= size * ROOM_BYTES / 16
        assert metrics.chunks == 1


def test_one_of_them_that_fails_is_the_only_one(both):
    pair, engine, _, dest = both
    engine.wrong = items_of(dest, table(ROOMS - 2, 16))
    tables = begin(pair)
    assert states(pair) == all_but(2)
    assert "injected" in pair.decode.failure(2).reason and not pair.decode.reading(2)
    first, *others = [into for room, into in enumerate(tables) if room != 2]
    oracle.assert_holds(dest, first, also=others)
    assert engine.posted[0] == sum(engine.posted[1:]) and len(engine.posted) == 1 + ROOMS


def test_where_no_fence_is_sure_all_fail_with_what_failed_first(both):
    pair, engine, _, dest = both
    engine.wrong, fence = items_of(dest, table(ROOMS - 2, 16)), engine.fence

    def unsure(peer, timeout=None):
        raise TransferError("it cannot be told whether bytes still land")

    engine.fence = unsure
    begin(pair)
    assert states(pair) == [FAILED] * ROOMS
    engine.fence = fence
    for room in range(ROOMS):
        assert "injected" in pair.decode.failure(room).reason and pair.decode.reading(room)
        with pytest.raises(ValueError, match="wait for its reads"):
            pair.decode.forget(room)


def test_where_a_fence_takes_too_long_all_fail_and_keep_their_pages_until_it_is_passed():
    with stepped(decode_engine=Reads(), decode_read_timeout=2.0) as pair:
        engine = pair.decode.engine
        engine.wrong, fence = items_of(pair.pools[1], table(ROOMS - 2, 16)), engine.fence
        engine.fence = lambda peer, timeout=None: False
        begin(pair)
        pair.step(20)
        assert not any(pair.decode.poll(room).ended for room in range(ROOMS))
        pair.clock.now += 2.1
        pair.step(5)
        for room in range(ROOMS):
            assert pair.decode.poll(room) is FAILED and pair.decode.reading(room)
            assert "injected" in pair.decode.failure(room).reason
        assert pair.decode.leases().quarantined == {"kv": ROOMS}
        engine.fence = fence
        pair.step(5)
        assert not any(pair.decode.reading(room) for room in range(ROOMS))
        assert not pair.decode.leases().quarantined


def test_of_a_peer_that_is_stuck_all_fail_at_once():
    with stepped(decode_engine=Reads(), decode_read_timeout=2.0) as pair:
        pair.decode.engine.open = False
        begin(pair)
        pair.step(20)
        for _ in range(5):
            pair.clock.now += 0.4
            pair.step(2)
        assert not any(pair.decode.poll(room).ended for room in range(ROOMS))
        pair.clock.now += 0.4
        pair.step(5)
        assert states(pair) == [FAILED] * ROOMS
        assert "The peer is stuck" in pair.decode.failure(0).reason


def test_a_room_that_is_aborted_before_is_left_out(both, monkeypatch):
    pair = both[0]
    begin(pair)
    pair.prefill.step()  # it has published them
    post = reader.Lane._begin

    def abort_first(self):
        pair.decode.abort(1, "the user went away.")
        return post(self)

    monkeypatch.setattr(reader.Lane, "_begin", abort_first)
    assert states(pair) == all_but(1)


def test_large_reads_are_posted_alone(both, monkeypatch):
    pair, engine, _, dest = both
    monkeypatch.setattr(reads, "SMALL_BYTES", ROOM_BYTES - 1)
    tables = begin(pair, [16, 3, 3, 16, 3])
    assert states(pair) == all_but(None)
    assert len(engine.posted) == 4  # the second and third together
    oracle.assert_holds(dest, tables[0], also=tables[1:])
