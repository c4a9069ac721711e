"""What every endpoint takes by keyword, and the transport that follows from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

from disagg.protocol.messages import MAX_TIMEOUT, MIN_TIMEOUT, Convention
from disagg.runtime.keys import read_keys
from disagg.runtime.socket_transport import SocketTransport
from disagg.runtime.transport import Transport
from disagg.runtime.zmq_transport import ZmqTransport

PEER_TIMEOUT = 10.0
STEPPED_PEER_TIMEOUT = 60.0


class Options(TypedDict, total=False):
    """What every endpoint takes by keyword."""

    peer_timeout: float
    """Seconds (10; 60 with `threaded=False`): a peer that is silent for longer is dead. Its rooms
    fail by name, and decode dials it until it is back. Longer than the other side may go without a
    step.
    """
    keys: str | os.PathLike[str] | None
    """A folder of `kvpool keys`, or this side's file of it: messages are encrypted, and only the
    other side's holders may connect. Without, messages stay on this host.
    """
    insecure: bool
    """Without keys, messages may leave this host all the same, and anybody may connect."""
    transport: Transport | None
    """Another one. Who made it closes it."""
    clock: Callable[[], float]
    """Seconds, monotonic."""
    threaded: bool
    """Without a thread (False), the caller calls `step()`; rooms move only then, and in `wait`."""
    prefault: bool
    """Decode allocates host memory that reads write to in the background, before the first read
    (True). False leaves it to the first read of each page.
    """
    conventions: Mapping[str, Convention]
    """What its bytes mean beside their layout, by name: the model, its rotary embedding, how index
    keys are turned (docs/connectors.md). A prefill that says something else is refused; names of
    which only one side says something are not compared.
    """


def check_options(endpoint: str, options: Options) -> float:
    """Raises TypeError or ValueError for options that cannot be; returns `peer_timeout`."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"{endpoint} takes no {', '.join(sorted(unknown))}.")
    default = PEER_TIMEOUT if options.get("threaded", True) else STEPPED_PEER_TIMEOUT
    peer_timeout = options.get("peer_timeout", default)
    if not MIN_TIMEOUT <= peer_timeout <= MAX_TIMEOUT:
        raise ValueError(
            f"peer_timeout={peer_timeout!r}: from {MIN_TIMEOUT} to {MAX_TIMEOUT:.0f} s."
        )
    keys, insecure = options.get("keys") is not None, options.get("insecure", False)
    if keys and insecure:
        raise ValueError("insecure=True is for endpoints without keys: give one of the two.")
    if options.get("transport") is not None and (keys or insecure):
        raise ValueError("a transport was given, which keys or insecure=True do not change.")
    return float(peer_timeout)


def open_transport(
    options: Options, side: Literal["prefill", "decode"]
) -> tuple[Transport, Callable[[], None]]:
    """The transport of an endpoint, and what closes it: nothing, if it is the caller's."""
    transport, keys = options.get("transport"), options.get("keys")
    if transport is not None:
        return transport, lambda: None
    made: SocketTransport | ZmqTransport
    if keys is None:
        made = SocketTransport(options.get("insecure", False))
    else:
        made = ZmqTransport(read_keys(keys, side))
    return made, made.close


def default_address(options: Options) -> str:
    """Where a prefill listens if nothing else is said: a new unix socket; with keys, a new port of
    loopback.
    """
    return "ipc://*" if options.get("keys") is None else "tcp://127.0.0.1:*"
