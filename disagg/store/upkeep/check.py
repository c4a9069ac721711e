"""Reads objects as a reader would, and compares all digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from disagg.store.chunks import ChunkLayout
from disagg.store.family import is_member
from disagg.store.floors.base import BeyondEnd, Floor, Listed, NotThere
from disagg.store.objects import (
    START_BYTES,
    Damaged,
    ObjectId,
    check_blocks,
    decode_head,
    decode_start,
    head_bytes,
)
from disagg.store.upkeep.inventory import (
    Held,
    StoredName,
    geometry_name,
    is_member_name,
    object_name,
)

CHECKED_AT_ONCE = 4
STRETCH_BYTES = 8 << 20
"""Of blocks that are read together; a larger block is read alone."""

ObjectState = Literal["sound", "damaged", "cut", "foreign", "gone"]
STATES: dict[ObjectState, str] = {
    "sound": "what their writers wrote",
    "damaged": "not what their names or digests say",
    "cut": "shorter than they say",
    "foreign": "not named as a store's, or of a geometry that cannot be read here",
    "gone": "removed meanwhile",
}


@dataclass(frozen=True, slots=True)
class ObjectVerdict:
    """What a check of an object has found; `why` is empty for a sound one."""

    name: str
    state: ObjectState
    nbytes: int
    why: str = ""

    @property
    def useless(self) -> bool:
        """Whether no engine can ever read it."""
        return self.state in ("damaged", "cut")


def check(floor: Floor, entry: Listed, namespaces: Mapping[str, Held]) -> ObjectVerdict:
    """Reads an object, or what else is listed. Raises FloorError where the floor does not answer.

    `namespaces` have the geometries.
    """

    def verdict(state: ObjectState, why: str = "") -> ObjectVerdict:
        return ObjectVerdict(entry.name, state, entry.size, why)

    name, numbered = object_name(entry.name), geometry_name(entry.name)
    if numbered is not None and numbered[0] in namespaces:
        why = namespaces[numbered[0]].refused.get(numbered[1])
        return (
            verdict("foreign", f"a geometry that cannot be read: {why}")
            if why
            else verdict("sound")
        )
    if is_member_name(entry.name):
        if is_member(floor, entry):
            return verdict("sound")
        return verdict("damaged", "its name is not the digest of its text.")
    if name is None:
        return verdict("foreign", "no name of a store's object.")
    namespace = namespaces.get(name.namespace)
    geometry = namespace.geometry(name.geometry) if namespace else None
    if geometry is None:
        return verdict("foreign", f"the catalogue has no geometry {name.geometry.hex()[:16]}.")
    if name.part >= len(geometry.parts) or name.kind not in geometry.parts[name.part]:
        return verdict("damaged", f"its geometry has no part {name.part} of kind {name.kind}.")
    layout = geometry.parts[name.part][name.kind]
    size = head_bytes(layout) + layout.nbytes
    if entry.size < size:
        return verdict("cut", f"{entry.size:,} bytes of {size:,}.")
    if entry.size > size:
        return verdict("damaged", f"{entry.size:,} bytes, {entry.size - size:,} too many.")
    try:
        _read(floor, entry.name, name, layout)
    except NotThere:
        return verdict("gone")
    except BeyondEnd as error:
        return verdict("cut", str(error))
    except Damaged as error:
        return verdict("damaged", str(error))
    return verdict("sound")


def check_all(
    floor: Floor, entries: Iterable[Listed], namespaces: Mapping[str, Held]
) -> Iterator[ObjectVerdict]:
    """Checks several at a time, in order."""
    with ThreadPoolExecutor(CHECKED_AT_ONCE, "kvpool check") as threads:
        left = iter(entries)
        while batch := [*islice(left, 8 * CHECKED_AT_ONCE)]:
            yield from threads.map(lambda entry: check(floor, entry, namespaces), batch)


def _read(floor: Floor, name: str, stored: StoredName, layout: ChunkLayout) -> None:
    """Reads a whole object. Raises Damaged, BeyondEnd and FloorError."""
    head = head_bytes(layout)
    with floor.read(name, [(0, head)]) as (data,):
        start = decode_start(data[:START_BYTES])
        identity = ObjectId(
            kind=stored.kind,
            key=stored.key,
            geometry=stored.geometry,
            part=stored.part,
            chunk=start.identity.chunk,
        )
        digests = decode_head(data, identity, layout)
        digests = digests.copy()  # the buffer is the floor's
    for blocks in _stretches(layout):
        first, stop = (head + int(layout.blocks[edge]) for edge in (blocks.start, blocks.stop))
        with floor.read(name, [(first, stop)]) as (data,):
            check_blocks([(blocks, data)], digests, layout)


def _stretches(layout: ChunkLayout) -> Iterator[range]:
    """All blocks, as many together as are read at once."""
    edges, first = layout.blocks, 0
    while first < len(edges) - 1:
        most = int(np.searchsorted(edges, edges[first] + STRETCH_BYTES, side="right")) - 1
        stop = max(first + 1, most)
        yield range(first, stop)
        first = stop
