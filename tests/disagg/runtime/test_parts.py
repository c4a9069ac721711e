"""How much of a read is posted at once, and how long it may take."""

from __future__ import annotations

import numpy as np
import pytest

from disagg import (
    DecodeEndpoint,
    KVPoll,
    PrefillEndpoint,
    TransferError,
)
from disagg.engines.base import create_engine, engine_class
from disagg.engines.local import LocalEngine
from kvpool import MHAPool, RequestAddress, Span
from tests import oracle
from tests.disagg.engines.peers import ENGINES, prefills
from tests.disagg.stepping import stepped
from tests.memory import MemoryNetwork, MemoryTransport

TOKENS = 150
MHA = {"num_kv_heads": 4, "head_dim": 64, "dtype": "bf16", "num_pages": 24, "page_size": 16}
LAYERS = {"layers": range(3)}


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
        prefills(engine, "MHAPool", [{**LAYERS, **MHA}], TOKENS) as [source],
        DecodeEndpoint(dest.layout, Counting(), staging=0) as decode,
    ):
        decode.connect([source.address], timeout=60)
        decode.receive("r1", address)
        source.send("r1", 0, TOKENS)
        assert decode.wait("r1", 60) is KVPoll.Success, decode.failure("r1")
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
    source_table, into = oracle.place(source, TOKENS), oracle.place(dest, TOKENS, seed=99)
    oracle.fill(source, source_table)
    oracle.blank(dest)
    now, engine = [0.0], Gate(parts_in_flight)
    network = MemoryNetwork()
    common = {"threaded": False, "clock": lambda: now[0], "peer_timeout": 3600.0}
    with (
        PrefillEndpoint(
            source.layout, create_engine("local"), "p", transport=MemoryTransport(network), **common
        ) as prefill,
        DecodeEndpoint(
            dest.layout, engine, read_timeout=10.0, transport=MemoryTransport(network), **common
        ) as decode,
    ):

        def steps():
            for _ in range(50):
                prefill.step()
                decode.step()

        decode.connect([prefill.address])
        for room in ("good", "stuck"):
            decode.receive(room, into)
            prefill.send(room, source_table)
            steps()
            arrived = len(engine.arrived)
            assert engine.in_flight == parts_in_flight
            while not decode.poll(room).ended:
                now[0] += 2.4  # a longer pause counts as no time of the read
                stuck = room == "stuck" and len(engine.arrived) > arrived + 2
                engine.allowed = 0 if stuck else 1
                steps()
                assert engine.in_flight <= parts_in_flight
            if room == "good":
                assert decode.poll(room) is KVPoll.Success, decode.failure(room)
                assert now[0] > 10  # the time-out
                oracle.assert_holds(dest, into)
                oracle.blank(dest)
        assert decode.poll("stuck") is KVPoll.Failed
        assert "nothing has arrived for 12.0 s" in str(decode.failure("stuck"))


class Together(LocalEngine):
    """No read arrives until `open`. The read that is posted as number `bad` fails then."""

    open = False
    bad = -1

    def __init__(self):
        super().__init__()
        self.posted = []

    def read(self, peer, batch):
        self.posted.append(super().read(peer, batch))
        return self.posted[-1]

    def poll(self, transfer):
        if not self.open:
            return False
        if self.posted.index(transfer) == self.bad:
            raise TransferError("it was meant to")
        return super().poll(transfer)


ROOMS = 6


@pytest.mark.parametrize("bad", [None, 0, 3, ROOMS - 1])
def test_small_rooms_of_one_rank_are_read_together_and_fail_alone(bad):
    source, dest = (MHAPool(**LAYERS, **MHA | {"num_pages": 80}) for _ in range(2))
    pages = [1 + 10 * room + np.random.default_rng(room).permutation(10) for room in range(ROOMS)]
    tables = [RequestAddress(TOKENS, {"kv": Span(ids)}) for ids in pages]
    oracle.blank(dest)
    for room, table in enumerate(tables):
        oracle.write(source, table, range(TOKENS), salt=room)
    engine = Together()
    engine.bad = -1 if bad is None else bad
    with stepped(source, dest, decode_engine=engine) as pair:
        for room, table in enumerate(tables):
            pair.prefill.send(room, table)
            pair.decode.receive(room, tables[-1 - room])
        pair.step_until(lambda: len(engine.posted) == ROOMS)  # before any has arrived
        engine.open = True
        for room in range(ROOMS):
            (state,) = pair.step_until_ended(room, pair.decode)
            assert state is (KVPoll.Failed if room == bad else KVPoll.Success), room
        pair.step_until(lambda: not any(pair.decode.reading(room) for room in range(ROOMS)))
    for room in set(range(ROOMS)) - {bad}:
        assert oracle.holds(dest, tables[-1 - room], salt=room), f"room {room}"


def test_reads_in_flight_together_are_bounded_by_bytes():
    source, dest = (MHAPool(**LAYERS, **MHA | {"num_pages": 80}) for _ in range(2))
    tables = [
        RequestAddress(TOKENS, {"kv": Span(1 + 10 * room + np.arange(10))}) for room in range(ROOMS)
    ]
    engine = Together()
    nbytes = 2 * 3 * 4 * 64 * 2 * 160  # K and V, layers, heads, elements, bytes, ten pages
    engine.max_bytes = 2 * nbytes
    with stepped(source, dest, decode_engine=engine) as pair:
        for room, table in enumerate(tables):
            pair.prefill.send(room, table)
            pair.decode.receive(room, table)
        pair.step(50)
        assert len(engine.posted) in (2, 3)
        engine.open = True
        for room in range(ROOMS):
            assert pair.step_until_ended(room, pair.decode) == [KVPoll.Success]
