"""What every endpoint takes by keyword, and the transport that follows from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

from disagg.engines.base import engine_names
from disagg.plan.matching import CAST_VALUES
from disagg.protocol.messages import MAX_TIMEOUT, MIN_TIMEOUT, Convention, Seconds
from disagg.protocol.status import Side
from disagg.runtime.socket_transport import SocketTransport
from disagg.runtime.sockets.listen_address import FORMS, ListenAddress
from disagg.runtime.sockets.tls import TLSFiles, open_keys, open_tls_files
from disagg.runtime.staging import MIN_STAGING
from disagg.runtime.transport import Transport
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.text import nearest
from kvpool.layout.units import MIN_BYTES, parse_memory

PEER_TIMEOUT = 10.0
STEPPED_PEER_TIMEOUT = 60.0
MAX_READERS = 1 << 16


class Rule(NamedTuple):
    """What a value may be: a type that it has as it is (a text is no number and no truth), in words
    `allowed`, and what else must hold: `fits` is false, or raises ValueError, where it does not.
    """

    kind: Any
    allowed: str
    fits: Callable[[Any], object] = lambda value: True


_Path = Annotated[str, Meta(min_length=1)]
_Positive = Annotated[float, Meta(gt=0)]
_Bytes = Annotated[int, Meta(ge=MIN_BYTES)]
_Readers = Annotated[int, Meta(ge=1, le=MAX_READERS)]
_BOUNDED = f"a number of seconds from {MIN_TIMEOUT} to {MAX_TIMEOUT:.0f}"
_TRUTH = Rule(bool, "True or False")
RULES: Mapping[str, Rule] = {
    "engine": Rule(str, "an installed engine's name", lambda name: name in engine_names()),
    "engine_options": Rule(dict[str, Any], "a JSON object of the engine's options"),
    "bind": Rule(str | None, f"{FORMS}; or None", ListenAddress.parse),
    "advertise": Rule(str | None, "tcp://HOST:PORT, or None", ListenAddress.parse),
    "keys": Rule(_Path | None, "a folder of `kvpool keys` or a file of it, or None"),
    "tls": Rule(
        dict[Literal["ca", "certificate", "key"], _Path] | None,
        'paths "ca", "certificate" and "key", or None',
        lambda files: len(files) == 3,
    ),
    "insecure": _TRUTH,
    "threaded": _TRUTH,
    "shared_memory": _TRUTH,
    "peer_timeout": Rule(Seconds, _BOUNDED),
    "offer_timeout": Rule(Seconds | None, f"{_BOUNDED}, or None"),
    "read_timeout": Rule(_Positive, "a number of seconds above 0"),
    "lease": Rule(_Positive | None, "a number of seconds above 0, or None"),
    "cast": Rule(bool | list[str], CAST_VALUES),
    "allow_missing": Rule(list[str], 'a list of owners or roles, such as ["draft"]'),
    "verify": Rule(Literal["checksum"] | None, "'checksum', or None"),
    "drain_seconds": Rule(
        Annotated[float, Meta(ge=0, le=MAX_TIMEOUT)], f"a number of seconds up to {MAX_TIMEOUT:.0f}"
    ),
    "stream": Rule(Literal["chunks", "layers"] | None, "'chunks', 'layers', or None"),
    "contract": Rule(
        str | None,
        "HOST:PORT such as 127.0.0.1:9400, or None",
        lambda place: ListenAddress.parse(f"tcp://{place}"),
    ),
    "store": Rule(_Path | None, "a URL (docs/store.md), or None"),
    "chunk_tokens": Rule(Annotated[int, Meta(ge=1, le=1 << 20)], "a number from 1 to 1048576"),
    "store_timeout": Rule(Seconds, _BOUNDED),
    "convert_to": Rule(str | None, "a type of floats, such as float8_e4m3fn, or None", dtype_name),
    "convert_room": Rule(
        _Bytes | str,
        f'bytes, {MIN_BYTES:,} or more, or text with a unit such as "4GiB"',
        lambda size: not isinstance(size, str) or parse_memory(size),
    ),
    "store_room": Rule(
        _Bytes | str | None,
        f'bytes, {MIN_BYTES:,} or more, or text with a unit such as "4GiB", or None',
        lambda size: not isinstance(size, str) or parse_memory(size),
    ),
    "ranks": Rule(_Readers, f"a number from 1 to {MAX_READERS}, or a Group"),
    "staging": Rule(
        Annotated[int, Meta(ge=0)],
        f"{MIN_STAGING:,} bytes or more, or 0 for none",
        lambda size: size == 0 or size >= MIN_STAGING,
    ),
}
"""Of options of endpoints and of settings of connectors, by name."""


class Options(TypedDict, total=False):
    """What every endpoint takes by keyword."""

    peer_timeout: float
    """Seconds (10; 60 with `threaded=False`): a peer that is silent for longer is dead. Its rooms
    fail by name, and decode dials it until it is back. Longer than its steps may be apart.
    """
    keys: str | os.PathLike[str] | None
    """A folder of `kvpool keys`, or this side's file of it: over TCP messages are encrypted, and
    only holders of the other side's may connect. Without, messages go over unix sockets only.
    """
    tls: TLSFiles | None
    """In place of keys, files of an organisation's own (docs/security.md)."""
    insecure: bool
    """TCP without keys: messages can be read, and any process may connect."""
    transport: Transport | None
    """Another one. Its maker closes it."""
    clock: Callable[[], float]
    """Seconds, monotonic."""
    threaded: bool
    """Without a thread (False), the caller calls `step()`; rooms move only then, and in `wait`."""
    conventions: Mapping[str, Convention]
    """What its bytes mean beside their layout, by name: the model, its rotary embedding, how index
    keys are turned (docs/connectors.md). A prefill that says something else is refused; names of
    which only one side says something are not compared.
    """


def check_values(**values: object) -> None:
    """Raises ValueError that says which value is wrong, and what it may be."""
    for name, value in values.items():
        rule = RULES.get(name)
        if rule is None:
            continue
        plain = _plain(value)
        try:
            fits = msgspec.convert(plain, rule.kind) is None or rule.fits(plain)
        except (ValueError, msgspec.ValidationError):
            fits = False
        if not fits:
            alike = ""
            if name == "engine":
                names = engine_names()
                alike = f" Installed are {', '.join(names)}.{nearest(str(value), names)}"
            raise ValueError(f"{name}={value!r}: {rule.allowed}.{alike}")


def _plain(value: object) -> object:
    """A value as rules know it: numpy's numbers and paths are numbers and texts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return float(value) if isinstance(value, float) else value


def check_options(endpoint: str, options: Options) -> float:
    """Raises TypeError or ValueError for options that cannot be; returns `peer_timeout`."""
    names = Options.__annotations__.keys()
    if unknown := sorted(options.keys() - names):
        raise TypeError(f"{endpoint} takes no {', '.join(unknown)}.{nearest(unknown[0], names)}")
    check_values(**options)
    ways = [name for name in ("keys", "tls") if options.get(name) is not None]
    ways += ["insecure=True"] if options.get("insecure", False) else []
    if len(ways) > 1:
        raise ValueError(f"{' and '.join(ways)}: give one of them.")
    if ways and options.get("transport") is not None:
        raise ValueError(f"a transport was given, which {ways[0]} does not change.")
    default = PEER_TIMEOUT if options.get("threaded", True) else STEPPED_PEER_TIMEOUT
    return float(options.get("peer_timeout", default))


def open_transport(options: Options, side: Side) -> SocketTransport:
    """A transport of the endpoint's own."""
    keys, tls, credentials = options.get("keys"), options.get("tls"), None
    if keys is not None:
        credentials = open_keys(keys, side)
    elif tls is not None:
        credentials = open_tls_files(tls, side)
    return SocketTransport(options.get("insecure", False), credentials)
