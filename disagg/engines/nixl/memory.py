"""Memory as NIXL names it, and the metadata by which a peer names its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from disagg.engines.base import TransferError
from kvpool.layout import Slab
from kvpool.layout.types import HOST

SEGMENTS = {HOST: "DRAM", "cuda": "VRAM"}
MAX_DEVICE = 1 << 16


class NixlMemory(NamedTuple):
    """The name that layouts use, NIXL's segment type, and the device number."""

    name: str
    segment: str
    device: int


class NixlMetadata(msgspec.Struct, frozen=True):
    """What a peer needs to read from this side: the memory's name, and the agent's metadata."""

    memory: str
    agent: bytes


def memory_of(name: str) -> NixlMemory:
    """The memory that layouts name `cpu` or `cuda:1`. Raises TransferError for others."""
    kind, _, number = name.partition(":")
    whole = number.isascii() and number.isdigit() and int(number[:9]) < MAX_DEVICE
    if kind not in SEGMENTS or (number and (not whole or kind == HOST)):
        raise TransferError(
            f"memory {name[:100]!r}: engine nixl moves {' and '.join(SEGMENTS)} memory. Use engine "
            "ascend for an NPU."
        )
    return NixlMemory(name, SEGMENTS[kind], int(number or 0))


def one_memory(slabs: Sequence[Slab], registered: str = "") -> str:
    """The memory that all slabs share, with what is registered. Raises TransferError."""
    for slab in slabs:
        if registered not in ("", slab.memory):
            raise TransferError(
                f"slab of {slab.nbytes} bytes on {slab.memory}, others on {registered}: an engine "
                "serves one memory. Create an endpoint with an engine for each."
            )
        registered = slab.memory
    return registered


def decode_metadata(metadata: bytes) -> NixlMetadata:
    """Decodes a peer's metadata (untrusted). Raises TransferError."""
    try:
        owner = msgspec.msgpack.decode(metadata, type=NixlMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"malformed metadata: {error}") from None
    memory_of(owner.memory)
    return owner
