"""What NIXL calls memory, and how a peer says which he has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from disagg.engines.base import TransferError
from kvpool.layout import Slab

SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}
MAX_DEVICE = 1 << 16


class Memory(NamedTuple):
    """What layouts call it, NIXL's segment, and the number of the device."""

    name: str
    segment: str
    device: int


class Told(msgspec.Struct, frozen=True):
    """What a peer is told: where one's memory lies, as layouts say it, and the agent's metadata."""

    memory: str
    agent: bytes


def memory_of(name: str) -> Memory:
    """What layouts call `cpu` or `cuda:1`. Raises TransferError for others."""
    kind, _, number = name.partition(":")
    whole = number.isascii() and number.isdigit() and int(number[:9]) < MAX_DEVICE
    if kind not in SEGMENTS or (number and (not whole or kind == "cpu")):
        raise TransferError(
            f"memory {name[:100]!r}: engine nixl moves {' and '.join(SEGMENTS)} memory. Use engine "
            "ascend for an NPU's."
        )
    return Memory(name, SEGMENTS[kind], int(number or 0))


def common(slabs: Sequence[Slab], known: str = "") -> str:
    """The one memory on which all slabs lie, `known` among them. Raises TransferError."""
    for slab in slabs:
        if known not in ("", slab.memory):
            raise TransferError(
                f"slab of {slab.nbytes} bytes on {slab.memory}, others on {known}: an engine "
                "serves one memory. Make an endpoint with an engine for each."
            )
        known = slab.memory
    return known


def told(metadata: bytes) -> Told:
    """Reads what a peer says (untrusted). Raises TransferError."""
    try:
        found = msgspec.msgpack.decode(metadata, type=Told)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"malformed metadata: {error}") from None
    memory_of(found.memory)
    return found
