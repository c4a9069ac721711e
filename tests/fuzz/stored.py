"""Geometries as a store's catalogue has them, written by whoever may write there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

from disagg.store.geometry import Geometry, namespace_of, readable
from disagg.store.objects import head_bytes
from disagg.store.upkeep.compare import compare, of_geometry, of_ranks
from kvpool.layout import PoolLayout
from tests.fuzz import build, edits, samples
from tests.fuzz.guard import Finding
from tests.fuzz.stretch import stretched

CHUNKS = 1, 24, 48, 256, 1 << 19, 1 << 20
"""Tokens."""
OWN = of_ranks("own", [("", samples.CASES[0].own)], {"model": "m", "vocab": 7}, 48)


def run(data: bytes) -> str:
    """A geometry or a ValueError; what was read is the same after a round trip, and can be read
    from, or refused with a reason.
    """
    try:
        geometry = Geometry.decode(data)
    except ValueError:
        return "refused"
    if geometry.encoded != data:
        raise Finding("it changes in a round trip.")
    for part in geometry.parts:
        for chunk in part.values():
            with suppress(ValueError):  # of more blocks than an object may have
                if head_bytes(chunk) < 8 * len(chunk.blocks) or chunk.blocks[-1] != chunk.nbytes:
                    raise Finding("its blocks are not all of it.")
            if geometry.chunk_tokens < 1 << 16:  # else what it says of positions is larger
                chunk.address(3)
    if any(geometry.parts):
        namespace_of(geometry)
        for layout in (samples.CASES[0].own, samples.CASES[4].own):
            with suppress(ValueError):
                readable(geometry, layout, {"model": "m"})
        compare(of_geometry("theirs", geometry), OWN)
    return "read"


def of(layouts: list[PoolLayout], tokens: int) -> bytes:
    return Geometry.of(layouts, {"model": "m", "vocab": 7}, tokens).encoded


def seeds() -> Iterator[bytes]:
    """Of one rank each, and of two."""
    for layout in samples.LAYOUTS:
        with suppress(ValueError):
            yield of([layout], 48)
    yield of([samples.heads(4, 0, 0, 4), samples.heads(8, 0, 4, 4)], 48)


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """An edit, or what an engine with a pool of extreme size would write."""
    if source.random() < 0.7:
        return edits.mutate(data, source, most)
    layout = stretched(source.choice(samples.LAYOUTS), build.Seeded(source.getrandbits(32)))
    try:
        return of([PoolLayout.from_msgpack(layout)], source.choice(CHUNKS))[:most]
    except ValueError:
        return edits.mutate(data, source, most)
