"""The loop of an endpoint, turned by the caller: many rooms, and an engine that is busy elsewhere.
And the transports under it.
"""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

import disagg
from disagg import (
    EndpointClosed,
    KVPoll,
    PeerError,
    PrefillEndpoint,
    SocketTransport,
    UsageError,
    create_engine,
)
from disagg.engines.local import LocalEngine
from disagg.runtime.options import PEER_TIMEOUT, STEPPED_PEER_TIMEOUT
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MLAPool, RequestAddress, Span
from tests import oracle
from tests.disagg.runtime.sides import decode_side, joined, pool, prefill_side, request
from tests.disagg.stepping import MLA, stepped

FILES = {"ca": "a", "certificate": "b", "key": "c"}


@pytest.mark.parametrize("keyed", [False, True])
def test_a_room_is_handed_over_by_steps_alone(keyed, keys):
    options = {"threaded": False, **({"keys": keys} if keyed else {})}
    threads = {*threading.enumerate()}
    with (
        prefill_side(**options) as (prefill, given),
        decode_side(verify="checksum" if keyed else None, **options) as (decode, dest, into),
    ):
        started = {thread.name for thread in {*threading.enumerate()} - threads}
        assert started == {"OfferServer"}  # the engine's, which sleeps until a peer dials
        decode.connect([prefill.address])
        decode.receive("r", into)
        prefill.send("r", given, aux={"first_token": 7})
        for _ in range(1_000_000):
            prefill.step()
            decode.step()
            if decode.poll("r").ended and prefill.poll("r").ended:
                break
        assert (decode.poll("r"), prefill.poll("r")) == (KVPoll.Success, KVPoll.Success)
        assert decode.aux("r") == {"first_token": 7}
        oracle.assert_holds(dest, into)


def test_a_step_never_waits():
    class Watched(MemoryTransport):
        def wait(self, timeout, wake=None):
            raise AssertionError(f"it waits {timeout} s")

    options = {"transport": Watched(MemoryNetwork()), "threaded": False}
    with prefill_side("x", **options) as (prefill, _):
        assert [prefill.step() for _ in range(3)] == [False] * 3


def test_wait_turns_the_loop_where_no_thread_does():
    with prefill_side() as (prefill, given), decode_side(threaded=False) as (decode, dest, into):
        decode.connect([prefill.address], timeout=20)
        prefill.send("r", given)
        decode.receive("r", into)
        with pytest.raises(TimeoutError, match="'r' is WaitingForInput after 0 s"):
            decode.wait("r", 0.0)
        assert decode.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, into)


def test_calls_that_an_endpoint_does_not_take_are_the_callers_errors():
    memory = pool()
    layout, engine = memory.layout, create_engine("local")
    for more in ({"keys": "k"}, {"tls": FILES}, {"insecure": True}):
        with pytest.raises(ValueError, match="a transport was given"):
            PrefillEndpoint(layout, engine, transport=MemoryTransport(MemoryNetwork()), **more)
    with pytest.raises(ValueError, match="keys and tls and insecure=True: give one of them"):
        PrefillEndpoint(layout, engine, keys="k", tls=FILES, insecure=True)
    prefill = PrefillEndpoint(layout, engine)
    with pytest.raises(UsageError, match="threaded=False"):
        prefill.step()
    prefill.close()
    with pytest.raises(EndpointClosed):
        prefill.abort("r", "late")


def test_a_transport_is_closed_by_its_maker():
    transport = SocketTransport()
    for _ in range(2):
        with joined({"bind": "ipc://*", "transport": transport}):
            pass
    transport.close()


def test_a_peer_without_a_connection_cannot_be_reached_in_memory():
    network = MemoryNetwork()
    listener, dialler = MemoryTransport(network), MemoryTransport(network)
    listener.bind("x")
    dialler.connect(3, "x")
    dialler.send(3, b"up")
    ((peer, data),) = listener.poll()
    assert data == b"up"
    assert listener.send(peer, b"down") is None
    assert [*dialler.poll()] == [(3, b"down")]
    dialler.connect(3, None)
    assert listener.send(peer, b"down") == dialler.send(3, b"up") == "it cannot be reached."


@pytest.mark.parametrize(
    ("error", "side", "kind"),
    [
        ("EndpointClosed", UsageError, RuntimeError),
        ("RoomError", UsageError, ValueError),
        ("UnknownRoom", UsageError, KeyError),
        ("HandshakeRefused", PeerError, RuntimeError),
        ("IncompatibleLayouts", PeerError, ValueError),
        ("TransferError", PeerError, RuntimeError),
        ("WireError", PeerError, ValueError),
    ],
)
def test_every_error_says_whose_it_is_and_of_what_kind(error, side, kind):
    assert issubclass(getattr(disagg, error), (side,))
    assert issubclass(getattr(disagg, error), (kind,))
    assert not issubclass(UsageError, PeerError)


ROOMS, PAGES_EACH, TOKENS = 300, 3, 40


def pool_of_many():
    return MLAPool(layers=range(2), **MLA | {"num_pages": ROOMS * PAGES_EACH + 1})


def test_hundreds_of_rooms_end_in_one_loop_and_are_listed_once():
    source, dest = pool_of_many(), pool_of_many()
    shuffled = [np.random.default_rng(seed).permutation(ROOMS * PAGES_EACH) + 1 for seed in (0, 1)]

    def table(side, room):
        pages = shuffled[side][room * PAGES_EACH : (room + 1) * PAGES_EACH]
        return RequestAddress(TOKENS, {"kv": Span(pages)})

    oracle.blank(dest)
    for room in range(ROOMS):
        oracle.write(source, table(0, room), range(TOKENS), salt=room)
    threads = {*threading.enumerate()}
    with stepped(source, dest) as engine:
        seen = {each: {} for each in engine.all}
        waiting = iter(range(ROOMS))
        while any(len(listed) < ROOMS for listed in seen.values()):
            for room in islice(waiting, 7):  # so many requests a scheduler's step
                engine.prefill.send(room, table(0, room))
                if room % 10 == 9:
                    engine.decode.decline(room)
                else:
                    engine.decode.receive(room, table(1, room))
            engine.step()
            for endpoint, listed in seen.items():
                for name, state, failure in endpoint.ended():
                    assert (state, failure) == (KVPoll.Success, None) and name not in listed
                    listed[name] = state
                    endpoint.forget(name)
        started = {thread.name for thread in {*threading.enumerate()} - threads}
        assert started <= {"OfferServer"}
        for endpoint in engine.all:
            assert not endpoint.machine.rooms.by_name and not any(endpoint.leases().leased.values())
    for room in range(ROOMS):
        if room % 10 != 9:
            assert oracle.holds(dest, table(1, room), salt=room), f"room {room}"
            continue
        for buffer in dest.layout.buffers:
            items = dest.item_bytes_view(buffer)[table(1, room).spans["kv"].ids.tolist()]
            assert (items == oracle.DEST).all(), f"declined room {room}"


def pass_time(engine, seconds, *awake, step=0.5):
    """Time passes, in which only some endpoints are stepped."""
    for _ in range(int(seconds / step)):
        engine.clock.now += step
        for endpoint in awake:
            endpoint.step()


@pytest.mark.parametrize("busy", ["prefill", "decode", "both"])
@pytest.mark.parametrize("seconds", [5, 40])
def test_an_engine_that_does_not_step_for_a_while_loses_no_peer(busy, seconds):
    with stepped() as engine:
        given, into = request(*engine.pools, TOKENS)
        engine.decode.receive("r", into)
        engine.step(3)
        awake = [each for each in engine.all if busy not in ("both", side_of(engine, each))]
        pass_time(engine, seconds, *awake)
        engine.prefill.send("r", given)
        assert engine.step_until_ended("r") == [KVPoll.Success] * 2
        oracle.assert_holds(engine.pools[1], into)


def side_of(engine, endpoint):
    return "prefill" if endpoint is engine.prefill else "decode"


@pytest.mark.parametrize("busy", ["prefill", "decode"])
def test_who_is_not_stepped_for_longer_than_the_time_out_is_dead_and_comes_back(busy):
    with stepped() as engine:
        given, into = request(*engine.pools, TOKENS)
        engine.decode.receive("r", into)
        engine.step(3)
        (awake,) = (each for each in engine.all if side_of(engine, each) != busy)
        pass_time(engine, STEPPED_PEER_TIMEOUT * 1.2, awake)
        ((room, state, failure),) = awake.ended()
        assert (room, state, failure.kind) == ("r", KVPoll.Failed, "lost")
        assert f"silent for more than {STEPPED_PEER_TIMEOUT:g} s" in failure.reason
        engine.step_until(lambda: engine.decode.poll("r").ended)
        for endpoint in engine.all:
            endpoint.abort("r", "both sides give it up.")
            endpoint.forget("r")
        engine.step_until(lambda: engine.links[0].plan is not None)
        engine.decode.receive("again", into)
        engine.prefill.send("again", given)
        assert engine.step_until_ended("again") == [KVPoll.Success] * 2
        oracle.assert_holds(engine.pools[1], into)


def test_time_in_which_nobody_steps_is_nobodys_silence():
    with stepped() as engine:
        engine.clock.now += 3600
        engine.step(5)
        assert engine.links[0].plan is not None
        assert engine.decode.snapshot().peers == engine.prefill.snapshot().peers == 1


class LateEngine(LocalEngine):
    """Reads that are not seen to have landed until `landed`."""

    landed = False

    def poll(self, transfer):
        return self.landed and super().poll(transfer)


@pytest.mark.parametrize(("steps", "state"), [(0, KVPoll.Success), (80, KVPoll.Failed)])
def test_a_read_is_stuck_only_while_somebody_looks(steps, state):
    late = LateEngine()
    with stepped(decode_engine=late, decode_read_timeout=30.0) as engine:
        source, dest = engine.pools
        engine.decode.receive("r", oracle.place(dest, TOKENS, 1))
        engine.prefill.send("r", oracle.place(source, TOKENS))
        engine.step_until(lambda: engine.decode.reading("r"))
        engine.step(3)
        pass_time(engine, steps * 0.5, *engine.all)  # all look, and nothing lands
        engine.clock.now += 45 - steps * 0.5  # nobody looks
        engine.step(1)
        late.landed = True
        assert engine.step_until_ended("r", engine.decode) == [state]


def test_a_time_out_that_is_given_is_taken_with_and_without_a_thread():
    with stepped(prefill_peer_timeout=2.0) as engine:
        assert engine.prefill.machine.hello.timeout == 2.0
        assert engine.decode.machine.hello.timeout == STEPPED_PEER_TIMEOUT > PEER_TIMEOUT
        pass_time(engine, 3.0, engine.prefill)
        assert engine.prefill.snapshot().peers == 0
