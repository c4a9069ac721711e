"""The loop of an endpoint, turned by the caller, and the transports under it."""

from __future__ import annotations

import threading

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
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from tests import oracle
from tests.disagg.runtime.sides import decode_side, pool, prefill_side

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
        with (
            prefill_side("ipc://*", transport=transport) as (prefill, _),
            decode_side() as (decode, _, _),
        ):
            decode.connect([prefill.address], timeout=20)
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
