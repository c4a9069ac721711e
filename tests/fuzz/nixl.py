"""Metadata of engine `nixl`, which NIXL and UCX read: a peer, a refusal, or a crash of the process.

Therefore this target runs only when it is named.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from disagg.engines.base import TransferError, create_engine
from kvpool.layout import Slab

_memory = np.zeros((2, 1 << 16), dtype=np.uint8)


@lru_cache
def _engine(number: int) -> Any:
    engine = create_engine("nixl")
    engine.register([Slab(_memory[number].ctypes.data, _memory[number].size)])
    return engine


def run(data: bytes) -> str:
    try:
        peer = _engine(0).connect(data)
    except (TransferError, ValueError):
        return "refused"
    _engine(0).fence(peer)
    return "connected"


def seeds() -> Iterator[bytes]:
    yield _engine(1).metadata()


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """Flips bits and inserts wrong 8-byte lengths: NIXL has a format of its own."""
    edited = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        offset = source.randrange(max(1, len(edited)))
        if source.getrandbits(1):
            old = edited[offset] if edited else 0
            edited[offset : offset + 1] = bytes([old ^ 1 << source.randrange(8)])
        else:
            length = source.choice((0, 1 << 31, 1 << 40, (1 << 64) - 1))
            edited[offset : offset + 8] = length.to_bytes(8, "big")
    return bytes(edited[:most])
