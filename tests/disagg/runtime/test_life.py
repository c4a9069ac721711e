"""The life of a hand-off: who is dead, what is leased, what returns, and what is said of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, SocketTransport, UnknownRoom
from disagg.engines.base import TransferError, create_engine
from disagg.exporter import export
from disagg.plan import IncompatibleLayouts
from disagg.protocol import codec
from disagg.protocol.codec import encode
from disagg.protocol.events import AbortAll
from disagg.protocol.messages import (
    ChunkReady,
    Hello,
    ReadDone,
    ReadRequest,
    ReleaseAck,
    UnknownPeer,
)
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MHAPool, RequestAddress, Shard
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import (
    TOKENS,
    arrives,
    decode_side,
    endpoints,
    items_of,
    joined,
    moves,
    pool,
    prefill_process,
    prefill_side,
    succeeds,
)
from tests.disagg.stepping import Clock
from tests.disagg.waiting import until
from tests.streams import dial

TIMEOUT = 3.0
"""Longer than a process that lives is kept waiting for a core."""


class Mutable:
    """A transport that sends nothing while it is muted, and never a message of type `lost`."""

    muted, lost = False, None

    def send(self, peer, data):
        lost = self.lost is not None and isinstance(codec.decode(data), self.lost)
        return None if self.muted or lost else super().send(peer, data)


class MutableSockets(Mutable, SocketTransport):
    """Over plain sockets, where the end of a connection is noticed."""


class MutableMemory(Mutable, MemoryTransport):
    """Within the process, where the end of a connection is not noticed."""


@pytest.fixture
def transport():
    made = MutableSockets()
    yield made
    made.close()


def test_a_lease_that_runs_out_fails_its_reader_and_frees_the_pages():
    options = {"lease": 0.3, "clock": (clock := Clock())}
    with joined(options) as (prefill, given, decode, _, address):
        decode.receive("r", address)
        prefill.send("r", RequestAddress(32, given.spans), last=False)
        assert prefill.leases().leased == {"kv": 5}
        until(prefill, lambda: prefill.poll("r") is KVPoll.Transferring)
        clock.now += 0.4
        assert prefill.wait("r", 20) is KVPoll.Failed
        assert "its lease ended: not every reader was done within 0.3 s" in str(
            prefill.failure("r")
        )
        assert prefill.leases().leased == {}
        assert decode.wait("r", 20) is KVPoll.Failed
        assert str(decode.failure("r")).startswith("prefill: its lease ended")


def test_a_room_that_nobody_wants_gives_its_pages_back():
    with prefill_side(lease=0.2) as (prefill, given):
        prefill.send("r", given)
        assert prefill.wait("r", 20) is KVPoll.Failed
        assert "no decode asked for it" in str(prefill.failure("r"))


def test_a_room_that_prefill_has_aborted_and_forgotten_fails_on_decode_too():
    with joined() as (prefill, given, decode, dest, address):
        prefill.send("r", given)
        prefill.abort("r", "gave up")
        prefill.forget("r")
        decode.receive("r", address)
        assert decode.wait("r", 20) is KVPoll.Failed
        assert str(decode.failure("r")) == "prefill: gave up"
        with pytest.raises(UnknownRoom):
            prefill.poll("r")
        decode.forget("r")
        moves(prefill, given, decode, dest, address)  # it knows now: the name is free again


@pytest.mark.parametrize("first", ["decode asks", "prefill sends"])
def test_a_retry_under_the_same_name_on_another_decode_reads_its_own_bytes_in_either_order(first):
    with joined() as (prefill, given, decode, _, address):
        decode.receive("r", address)
        until(prefill, lambda: "r" in prefill.machine.rooms.by_name)
        decode.close()
        assert prefill.wait("r", 20) is KVPoll.Failed
        prefill.forget("r")
        with decode_side() as (other, dest, where):
            other.connect([prefill.address], timeout=20)
            if first == "prefill sends":
                prefill.send("r", given)
            other.receive("r", where)
            if first == "decode asks":
                until(prefill, lambda: "r" in prefill.machine.rooms.by_name)
                prefill.send("r", given)
            succeeds(prefill, "r")
            arrives(other, "r", dest, where)


@pytest.mark.parametrize(
    ("side", "lost"),
    [
        *(("decode", each) for each in (ReadRequest, ReadDone)),
        *(("prefill", each) for each in (ChunkReady, ReleaseAck)),
    ],
)
def test_a_room_ends_on_both_sides_whatever_message_is_lost(transport, side, lost):
    """Over a connection that lives on: pings are answered all the while."""
    transport.lost, clock = lost, Clock()
    mine = {"prefill": {}, "decode": {}} | {side: {"transport": transport}}
    with (
        prefill_side(lease=0.6, clock=clock, **mine["prefill"]) as (prefill, given),
        decode_side(offer_timeout=0.4, **mine["decode"]) as (decode, _, address),
    ):
        link = decode.connect([prefill.address], timeout=20)
        prefill.send("r", given)
        decode.receive("r", address)
        assert decode.wait("r", 20) is KVPoll.Failed
        failure = decode.failure("r")
        assert (failure.side, failure.kind) == ("decode", "timeout")
        assert f"rank 0 of prefill ({prefill.address})" in failure.reason
        clock.now += 1.0
        prefill.wait("r", 20)  # where only the ack was lost, it has succeeded
        assert link.lost is None


def test_a_done_that_comes_after_the_lease_is_no_success():
    """What was read while pages had gone to another request is never called good."""
    with joined({"lease": 0.3}) as (prefill, given, decode, _, address):
        read, released = decode.engine.read, threading.Event()

        def late(*given):
            assert released.wait(20)
            return read(*given)

        decode.engine.read = late
        decode.receive("r", address)
        prefill.send("r", given)
        assert prefill.wait("r", 20) is KVPoll.Failed
        released.set()
        assert decode.wait("r", 20) is KVPoll.Failed
        until(decode, lambda: not decode.reading("r"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_prefill_is_noticed_its_rooms_fail_by_name_and_it_returns(engine):
    dest = pool()
    address = oracle.place(dest, TOKENS, 9)
    oracle.blank(dest)
    with (
        prefill_process(engine=engine) as one,
        prefill_process(engine=engine) as two,
        DecodeEndpoint(dest.layout, create_engine(engine), peer_timeout=TIMEOUT) as decode,
    ):
        link, other = (decode.connect([source.address], timeout=60) for source in (one, two))
        decode.receive("lost", address, link=link)
        decode.receive("other", oracle.place(dest, 0), link=other)
        os.kill(one.process.pid, signal.SIGSTOP)
        assert decode.wait("lost", 20) is KVPoll.Failed
        reason = f"rank 0 of prefill ({one.address}) is lost: it was silent for more than 3 s."
        assert str(decode.failure("lost")) == f"prefill: {reason}"
        decode.receive("at once", address, link=link)
        assert str(decode.failure("at once")) == f"prefill: {reason}"
        assert decode.poll("other") is KVPoll.WaitingForInput
        decode.forget("lost")
        decode.receive("lost", address, link=other)  # the same room, from another prefill
        two.ask("lost")
        arrives(decode, "lost", dest, address)
        os.kill(one.process.pid, signal.SIGCONT)
        until(decode, lambda: link.lost is None)
        oracle.blank(dest)
        decode.receive("again", address, link=link)
        one.ask("again")
        arrives(decode, "again", dest, address)


def test_a_restart_shorter_than_the_time_out_is_noticed_by_generation():
    """nixl#2051, vllm#49238: messages of another generation are refused, the next hello works."""
    network = MemoryNetwork()
    with decode_side(transport=MemoryTransport(network)) as (decode, dest, address):
        transport = MutableMemory(network)
        with prefill_side("p", transport=transport) as (prefill, _):
            link = decode.connect([prefill.address], timeout=20)
            decode.receive("r", address)
            transport.muted = True  # it ends without a word
        with prefill_side("p", transport=MemoryTransport(network)) as (prefill, given):
            assert decode.wait("r", 20) is KVPoll.Failed
            assert "no longer knows this decode" in str(decode.failure("r"))
            until(decode, lambda: link.settled)
            moves(prefill, given, decode, dest, address, "again")


def test_a_prefill_that_never_answers_fails_rooms_within_the_time_out():
    with decode_side(peer_timeout=0.2) as (decode, _, address):
        link = decode.connect(["ipc:///nobody"])
        decode.receive("r", address)
        assert decode.wait("r", 20) is KVPoll.Failed
        assert "has not answered for more than 0.2 s" in str(decode.failure("r"))
        decode.disconnect(link)
        with pytest.raises(ValueError, match="was disconnected"):
            decode.receive("s", address, link=link)


def test_a_prefill_that_closes_says_so_and_nobody_waits_for_a_time_out():
    with decode_side(peer_timeout=60) as (decode, _, address):
        with prefill_side() as (prefill, _):
            link = decode.connect([prefill.address], timeout=20)
            decode.receive("r", address)
            until(prefill, lambda: prefill.poll("r") is KVPoll.WaitingForInput)
        assert decode.wait("r", 20) is KVPoll.Failed
        assert str(decode.failure("r")) == "prefill: the endpoint was closed."
        until(decode, lambda: link.lost is not None)
        decode.receive("s", address)
        assert "no longer knows this decode" in str(decode.failure("s"))


def test_who_has_said_goodbye_greets_nobody():
    """A hello that comes in between would be answered by a life that is over."""
    with (
        prefill_side() as (prefill, _),
        decode_side() as (decode, _, _),
        dial(prefill.address) as stream,
    ):
        stream.send(encode(decode.machine.hello))
        assert isinstance(codec.decode(stream.receive()), Hello)
        handle = prefill.machine.handle

        def late(event, now):
            effects = handle(event, now)
            if isinstance(event, AbortAll):
                stream.send(encode(decode.machine.hello))
                time.sleep(0.3)  # it lies in the socket when the last turn begins
            return effects

        prefill.machine.handle = late
        prefill.close()
        heard = []
        while (data := stream.receive()) is not None:
            heard.append(type(codec.decode(data)))
        assert heard == [UnknownPeer]


def test_disconnecting_ends_rooms_on_both_sides_and_leaves_nothing():
    with prefill_side() as (prefill, given), decode_side() as (decode, _, address):
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            link = decode.connect([prefill.address], timeout=20)
            decode.receive("r", address)
            prefill.send("r", RequestAddress(16, given.spans), last=False)
            decode.disconnect(link)
            assert "decode has disconnected" in str(decode.failure("r"))
            assert prefill.wait("r", 20) is KVPoll.Failed
            until(decode, lambda: not decode.reading("r"))
            decode.forget("r")
            prefill.forget("r")
        assert prefill.refusals() == []
        # a connection is closed once its last messages have had time to leave
        until(decode, lambda: len(os.listdir("/proc/self/fd")) <= files + 10)


def peers_of(prefill):
    """Decodes that it serves."""
    return prefill.snapshot().peers


def test_a_connect_that_times_out_leaves_nothing_and_the_next_one_works():
    with prefill_side() as (first, _):
        at = first.address
    with decode_side() as (decode, dest, address):
        files = 0
        for _ in range(4):
            with pytest.raises(TimeoutError, match="no answer from"):
                decode.connect([at], timeout=0.2)
            files = files or len(os.listdir("/proc/self/fd"))
        assert decode.machine.peers.links == []
        # the thread closes files in its next turn
        until(decode, lambda: len(os.listdir("/proc/self/fd")) <= files)
        with prefill_side(at) as (prefill, given):
            decode.connect([at], timeout=20)
            moves(prefill, given, decode, dest, address)  # without naming the one link
            assert (len(decode.machine.peers.links), peers_of(prefill)) == (1, 1)


def test_a_connect_that_is_refused_leaves_nothing():
    with prefill_side() as (prefill, _):
        other = mha(layers=[0], page_size=4)
        with DecodeEndpoint(other.layout, create_engine("local")) as decode:
            with pytest.raises(IncompatibleLayouts, match="it holds none, but target latent"):
                decode.connect([prefill.address], timeout=20)
            assert decode.machine.peers.links == []
            until(prefill, prefill.refusals)
            assert "target layer 0 k: prefill offers no such region" in prefill.refusals()[0]
        assert peers_of(prefill) == 0


def test_a_prefill_that_is_full_serves_who_waits_once_another_leaves(monkeypatch):
    monkeypatch.setattr("disagg.protocol.peers.prefill_peers.MAX_PEERS", 1)
    with (
        prefill_side() as (prefill, given),
        decode_side() as (first, _, _),
        decode_side(peer_timeout=4) as (second, dest, address),
    ):
        link = first.connect([prefill.address], timeout=20)
        waiting = second.connect([prefill.address])
        until(second, lambda: waiting.lost is not None)
        with pytest.raises(TimeoutError, match=r"The last try: .* 1 decodes are connected already"):
            second.handshake(waiting, 0.1)
        first.disconnect(link)
        second.handshake(waiting, 20)
        moves(prefill, given, second, dest, address)


def test_a_decode_that_closes_is_forgotten_at_once():
    with prefill_side(peer_timeout=60) as (prefill, _):
        with decode_side() as (decode, _, _):
            decode.connect([prefill.address], timeout=20)
            assert peers_of(prefill) == 1
        until(prefill, lambda: peers_of(prefill) == 0)


def test_one_rank_that_is_stuck_does_not_hold_up_another():
    with (
        prefill_side() as (prefill, given),
        prefill_side() as (other, same),
        decode_side() as (decode, dest, address),
    ):
        stuck, works = (decode.connect([each.address], timeout=20) for each in (prefill, other))
        poll, read = decode.engine.poll, decode.engine.read
        decode.engine.read = lambda peer, batch: (read(peer, batch), peer)[1]
        first = []
        decode.engine.poll = lambda peer: peer not in (first or ([first.append(peer)] and first))
        decode.receive("stuck", oracle.elsewhere(dest, address), link=stuck)
        prefill.send("stuck", given)
        until(decode, lambda: first)
        decode.receive("works", address, link=works)
        other.send("works", same)
        succeeds(decode, "works")
        assert decode.poll("stuck") is KVPoll.Transferring
        decode.engine.poll = poll


def test_values_that_must_come_are_missed_by_name_and_others_are_kept():
    """sglang's positional aux buffers: values have names, and are asked for by them."""
    with joined() as (prefill, given, decode, _, address):
        decode.receive("r", address, aux=("first_token", "hidden"))
        prefill.send("r", given, aux={"first_token": 7, "logprob": -1.5})
        assert decode.wait("r", 20) is KVPoll.Failed
        said = "prefill sent no aux value hidden (it sent: first_token, logprob)."
        assert str(decode.failure("r")) == f"decode: {said}"
        assert prefill.wait("r", 20) is KVPoll.Failed
        decode.receive("s", address, aux=["first_token"])
        prefill.send("s", given, aux={"first_token": 7, "logprob": -1.5})
        succeeds(decode, "s")
        assert decode.aux("s") == {"first_token": 7, "logprob": -1.5}
        with pytest.raises(ValueError, match="a list of names"):
            decode.receive("t", address, aux="first_token")


# digests


def mha(**more):
    return MHAPool(
        num_kv_heads=4, head_dim=8, dtype="bf16", num_pages=20, **{"layers": range(4), **more}
    )


@pytest.mark.parametrize("wrong", [False, True])
def test_digests_agree_over_other_ranks_pages_and_orders_and_name_what_differs(wrong):
    ranks = [
        mha(layers=layers, total_kv_layers=4, shard=Shard(rank, 2), order="hnd", page_size=16)
        for layers in (range(3), [3])
        for rank in range(2)
    ]
    dest = mha(page_size=8)
    oracle.blank(dest)
    address = oracle.place(dest, TOKENS, 9)
    with ExitStack() as stack:
        prefill = endpoints(stack, PrefillEndpoint, ranks)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], verify="checksum")
        decode.connect([each.address for each in prefill], timeout=20)
        decode.receive("r", address)
        for each, source in zip(prefill, ranks):
            each.send("r", oracle.filled(source, TOKENS, 3), tokens=range(40), last=False)
        until(decode, lambda: decode.metrics("r").bytes_moved == 40 * dest.bytes_per_token)
        if wrong:
            page = int(address.spans["kv"].ids[2])
            dest.view("v", 3)[page, 5, 2, 3] = 1
        for each, source in zip(prefill, ranks):
            each.send("r", oracle.place(source, TOKENS, 3))
        assert decode.wait("r", 20) is (KVPoll.Failed if wrong else KVPoll.Success)
        if wrong:
            said = str(decode.failure("r"))
            assert "what was read differs from what rank 3 of prefill" in said
            assert said.endswith("target layer 3 v (head 2-3 of 4): position 21 differs.")
        else:
            oracle.assert_holds(dest, address)
        for each in prefill:
            assert each.wait("r", 20) is (KVPoll.Failed if wrong else KVPoll.Success)


def test_a_failed_read_is_one_rooms_and_the_next_goes_on():
    """sglang's worker thread dies of one request's exception."""
    with joined() as (prefill, given, decode, dest, address):
        bad = oracle.elsewhere(dest, address)
        read, wrong = decode.engine.read, items_of(dest, bad)

        def faulty(peer, batch):
            if any(pointer in item for pointer in batch.dst.tolist() for item in wrong):
                raise TransferError("injected")
            return read(peer, batch)

        decode.engine.read = faulty
        decode.receive("bad", bad)
        decode.receive("good", address)
        for room in ("bad", "good"):
            prefill.send(room, given)
        assert decode.wait("bad", 20) is KVPoll.Failed
        assert "injected" in str(decode.failure("bad"))
        succeeds(decode, "good")


def test_what_real_endpoints_count_is_served():
    with (
        joined(verify="checksum") as (prefill, given, decode, dest, address),
        export({"p": prefill, "d": decode}) as server,
    ):
        decode.receive("good", address)
        decode.receive("bad", oracle.elsewhere(dest, address))
        prefill.send("good", given)
        assert decode.wait("good", 20) is prefill.wait("good", 20) is KVPoll.Success
        decode.abort("bad", "preempted")
        prefill.wait("bad", 20)
        page = urlopen(f"http://{server.addr}:{server.port}/metrics").read().decode()
        moved = TOKENS * dest.bytes_per_token
        for line in (
            'kvpool_rooms_total{endpoint="d",outcome="success"} 1.0',
            'kvpool_failures_total{endpoint="d",kind="abort",side="decode"} 1.0',
            'kvpool_failures_total{endpoint="p",kind="abort",side="decode"} 1.0',
            f'kvpool_moved_bytes_total{{endpoint="d"}} {float(moved)}',
            f'kvpool_bound_bytes_total{{endpoint="d",owner="target",roles="latent, rope"}} '
            f"{float(moved)}",
            'kvpool_alive_peers{endpoint="d"} 1.0',
            'kvpool_alive_peers{endpoint="p"} 1.0',
        ):
            assert line in page.splitlines(), page
        told = decode.metrics("good")
        phases = (told.plan_seconds, told.bind_seconds, told.wait_seconds, told.wire_seconds)
        assert all(0 < seconds < told.total_seconds + told.plan_seconds for seconds in phases)
        assert told.verify_seconds > 0
