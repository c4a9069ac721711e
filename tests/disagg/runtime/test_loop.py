"""The loop of an endpoint, turned by the caller, and the transports under it."""

from __future__ import annotations

import threading

import pytest

import disagg
from disagg import (
    DecodeEndpoint,
    EndpointClosed,
    KVPoll,
    PeerError,
    PrefillEndpoint,
    SocketTransport,
    UsageError,
    create_engine,
)
from kvpool import MHAPool
from tests import oracle
from tests.memory import MemoryNetwork, MemoryTransport

TOKENS = 75
FILES = {"ca": "a", "certificate": "b", "key": "c"}
MHA = {"num_kv_heads": 4, "head_dim": 8, "dtype": "bf16", "num_pages": 12, "page_size": 16}


@pytest.fixture
def pools():
    """A pool that holds a request, and one that is to hold it, each with its block table."""
    source = MHAPool(layers=range(2), **MHA)
    dest = MHAPool(layers=range(2), **{**MHA, "page_size": 8, "num_pages": 40})
    given = oracle.place(source, TOKENS)
    oracle.fill(source, given)
    oracle.blank(dest)
    return source, given, dest, oracle.place(dest, TOKENS, 9)


@pytest.mark.parametrize(
    ("transport", "verify"),
    [("unix", None), ("insecure", None), ("keys", "checksum"), ("memory", "checksum")],
)
def test_a_room_is_handed_over_by_steps_alone(pools, transport, verify, keys):
    source, given, dest, into = pools
    bind, sides = "tcp://127.0.0.1:*", [{"threaded": False}, {"threaded": False}]
    if transport == "memory":
        network, bind = MemoryNetwork(), "here"
        sides = [{**each, "transport": MemoryTransport(network)} for each in sides]
    elif transport == "unix":
        bind = None
    elif transport == "insecure":
        sides = [{**each, "insecure": True} for each in sides]
    elif transport == "keys":
        sides = [{**each, "keys": keys} for each in sides]
    threads = {*threading.enumerate()}
    engines = create_engine("local"), create_engine("local")
    with (
        PrefillEndpoint(source.layout, engines[0], bind, **sides[0]) as prefill,
        DecodeEndpoint(dest.layout, engines[1], verify=verify, **sides[1]) as decode,
    ):
        started = {thread.name for thread in {*threading.enumerate()} - threads}
        # the engine's, which sleeps until a peer dials, and one that ends by itself
        assert started - {"Prefault"} == {"OfferServer"}
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


def test_a_step_never_waits(pools):
    class Watched(MemoryTransport):
        def wait(self, timeout, wake=None):
            raise AssertionError(f"it waits {timeout} s")

    options = {"transport": Watched(MemoryNetwork()), "threaded": False}
    with PrefillEndpoint(pools[0].layout, create_engine("local"), "x", **options) as prefill:
        assert [prefill.step() for _ in range(3)] == [False] * 3


def test_wait_turns_the_loop_where_no_thread_does(pools):
    source, given, dest, into = pools
    with (
        PrefillEndpoint(source.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), threaded=False) as decode,
    ):
        decode.connect([prefill.address], timeout=20)
        prefill.send("r", given)
        decode.receive("r", into)
        with pytest.raises(TimeoutError, match="'r' is WaitingForInput after 0 s"):
            decode.wait("r", 0.0)
        assert decode.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, into)


def test_calls_that_an_endpoint_does_not_take_are_the_callers_errors(pools):
    layout, engine = pools[0].layout, create_engine("local")
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


def test_a_transport_is_closed_by_its_maker(pools):
    layout, transport = pools[0].layout, SocketTransport()
    for _ in range(2):
        with (
            PrefillEndpoint(layout, create_engine("local"), "ipc://*", transport=transport) as made,
            DecodeEndpoint(layout, create_engine("local")) as decode,
        ):
            decode.connect([made.address], timeout=20)
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
