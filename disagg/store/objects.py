"""The bytes of an object: a head of fixed size, then the blocks of a chunk.

    8   b"KVPOOL\\0\\1", the last byte a version
    1   kind: 0 full, 1 window, 2 state
    7   zeros
    32  chain key: of the chunk's tokens and all before them
    16  geometry, the digest of the writers' layouts and conventions
    4   part: which of these layouts
    4   chunk: its number in the request
    8   bytes of data
    32  parent: the chain key of the chunk before it, zeros for the first
    8n  XXH3-64 of each of the n blocks
    8   XXH3-64 of all before

Numbers are little-endian. How many blocks there are and where they begin follows from the layout.
An object comes from a stranger: of it nothing is used before it is compared with what is expected.
Readers do not need the parent, which the chain key implies; it is for commands that list a store,
and show which prefixes continue where.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from disagg.digest.cell_hash import Hashes
from disagg.portable.staging import Bytes
from disagg.store.chunks import KINDS, ChunkLayout
from kvpool.extras import needed_by

MAGIC = b"KVPOOL\0\1"
_FIXED = struct.Struct("<8sB7x32s16sIIQ")
_PARENT = struct.Struct("<32s")
START_BYTES = _FIXED.size + _PARENT.size
"""Of a head, before its digests: what says which object it is."""
NO_PARENT = bytes(_PARENT.size)
_DIGEST = np.dtype("<u8")


class Damaged(ValueError):
    """An object that is not what its name says. `name` is its name, once that is known."""

    name = ""


class ObjectId(NamedTuple):
    """Which object it is, as its head says too."""

    kind: str
    key: bytes
    geometry: bytes
    part: int
    chunk: int

    def name(self, namespace: str) -> str:
        """Its name on a floor."""
        geometry = self.geometry.hex()
        return f"{namespace}/{self.key.hex()}/{geometry}.{self.part}.{self.kind}"


class Start(NamedTuple):
    """What a head says before its digests; none of it is checked."""

    identity: ObjectId
    nbytes: int
    parent: bytes


def head_bytes(layout: ChunkLayout) -> int:
    """The size of the head."""
    return START_BYTES + len(layout.blocks) * _DIGEST.itemsize


def encode_head(identity: ObjectId, parent: bytes, layout: ChunkLayout, data: Bytes) -> bytes:
    """The head of an object with these bytes of data. `parent` is the key of the chunk before."""
    edges = layout.blocks.tolist()
    values = [_digest()(data[start:stop].data) for start, stop in pairwise(edges)]
    start = _fixed(identity, layout) + _PARENT.pack(parent)
    covered = start + np.array(values, dtype=_DIGEST).tobytes()
    return covered + np.array([_digest()(covered)], dtype=_DIGEST).tobytes()


def decode_start(data: bytes | memoryview) -> Start:
    """The first `START_BYTES` of an unknown object. Raises Damaged for what begins no object."""
    if len(data) < START_BYTES:
        raise Damaged(f"it has {len(data)} bytes, fewer than any head.")
    magic, kind, key, geometry, part, chunk, nbytes = _FIXED.unpack_from(data)
    (parent,) = _PARENT.unpack_from(data, _FIXED.size)
    if magic != MAGIC or kind >= len(KINDS):
        raise Damaged(f"its head says {_words(bytes(data))}, which is no object of a store.")
    if (chunk == 0) != (parent == NO_PARENT):
        raise Damaged(f"its head says chunk {chunk} with parent {parent.hex()[:16]}.")
    return Start(
        ObjectId(kind=KINDS[kind], key=key, geometry=geometry, part=part, chunk=chunk),
        nbytes,
        parent,
    )


def decode_head(head: bytes | memoryview, identity: ObjectId, layout: ChunkLayout) -> Hashes:
    """The digests of the blocks. Raises Damaged for the head of another object, and for none."""
    data = bytes(head)
    if len(data) != head_bytes(layout):
        raise Damaged(f"its head has {len(data)} bytes, not {head_bytes(layout)}.")
    expected = _fixed(identity, layout)
    if data[: _FIXED.size] != expected:
        raise Damaged(f"its head says {_words(data)}, not {_words(expected)}.")
    values = np.frombuffer(data, dtype=_DIGEST, offset=START_BYTES)
    if int(values[-1]) != _digest()(data[: -_DIGEST.itemsize]):
        raise Damaged("its head is damaged: its digest is another.")
    return values[:-1]


def check_blocks(
    stretches: Sequence[tuple[range, memoryview]], digests: Hashes, layout: ChunkLayout
) -> None:
    """Compares blocks, given as stretches of consecutive ones, with their digests. Raises Damaged,
    which names layers.
    """
    for blocks, data in stretches:
        edges = (
            layout.blocks[blocks.start : blocks.stop + 1] - layout.blocks[blocks.start]
        ).tolist()
        if len(data) != edges[-1]:
            raise Damaged(f"blocks {blocks.start} to {blocks.stop - 1} have {len(data)} bytes.")
        for block, start, stop in zip(blocks, edges, edges[1:]):
            if _digest()(data[start:stop]) != int(digests[block]):
                raise Damaged(f"block {block} of {len(digests)} is damaged: its digest is another.")


@cache
def _digest() -> Callable[[Any], int]:
    with needed_by("disagg.store"):
        from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest


def _fixed(identity: ObjectId, layout: ChunkLayout) -> bytes:
    kind = KINDS.index(identity.kind)
    key, geometry = identity.key, identity.geometry
    return _FIXED.pack(MAGIC, kind, key, geometry, identity.part, identity.chunk, layout.nbytes)


def _words(data: bytes) -> str:
    """What the fixed part of a head says."""
    magic, kind, key, geometry, part, chunk, nbytes = _FIXED.unpack_from(data)
    if magic != MAGIC:
        return f"{magic!r}"
    name = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
    return (
        f"{name} of chunk {chunk}, key {key.hex()[:16]}, geometry {geometry.hex()[:16]}, part "
        f"{part}, {nbytes} bytes"
    )
