"""Socket transports that listen and dial, and what arrives at them."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

TCP = "tcp://127.0.0.1:*"
ADDRESSES = ["ipc://*", TCP, "tls", "tcp://localhost:*"]
with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    ADDRESSES.append("tcp://[::1]:*")  # a host without IPv6 has none to test


def both(transports, where):
    """A transport that listens, its address, and one that dials."""
    sides = ("prefill", "decode") if where == "tls" else (None, None)
    listener, dialler = map(transports, sides)
    return listener, listener.bind(TCP if where == "tls" else where), dialler


def arrivals(transport, seconds=0.0, wake=None):
    """What has arrived, or else arrives within a wait of `seconds`."""
    news = [*transport.poll()]
    if not news:
        transport.wait(seconds, wake)
        news = [*transport.poll()]
    return news


def collect(transport, enough, seconds=20.0, beside=()):
    """What arrives until `enough(found)`; the transports `beside` are turned as well."""
    found, until = [], time.monotonic() + seconds
    while not enough(found):
        assert time.monotonic() < until, f"{len(found)} arrived"
        found.extend(arrivals(transport, 0.01))
        for other in beside:
            assert not [*other.poll()]
    return found


def receive(transport, count, beside=()):
    """The next `count` of what arrives."""
    found = collect(transport, lambda found: len(found) >= count, beside=beside)
    assert len(found) == count
    return found


def pair_of(listener, address, transport, peer=7):
    """Has `transport` dial; returns the name by which the listener knows it."""
    transport.connect(peer, address)
    assert transport.send(peer, b"hello") is None
    ((name, data),) = receive(listener, 1, beside=[transport])
    assert data == b"hello"
    return name
