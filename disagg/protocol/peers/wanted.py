"""What decode's hello says of layouts: the owners and roles of which prefill shows its regions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvpool.layout import VERSION, PoolLayout, Region
from kvpool.layout.codec import MAX_BYTES
from kvpool.layout.sentences import one_line
from kvpool.layout.types import MAX_PARTS, MAX_REASON, Name

Pair = tuple[str, str]
"""An owner and a role."""


class _Named(Struct):
    owner: Name
    role: Name


class _Wanted(Struct):
    """A layout, as far as prefill reads decode's."""

    version: int
    regions: Annotated[list[_Named], Meta(max_length=MAX_PARTS)] = []


_decoder = msgspec.msgpack.Decoder(_Wanted)


def pairs_of(regions: Iterable[Region | _Named]) -> frozenset[Pair]:
    """Owners and roles of regions."""
    return frozenset((region.owner, region.role) for region in regions)


def wanted_layout(layouts: Iterable[PoolLayout]) -> bytes:
    """The owners and roles of a decode rank, or of all ranks of its group, as they are sent."""
    pairs = frozenset[Pair]().union(*(pairs_of(layout.regions) for layout in layouts))
    regions = [_Named(owner=owner, role=role) for owner, role in sorted(pairs)]
    return msgspec.msgpack.encode(_Wanted(version=VERSION, regions=regions))


def wanted_pairs(layout: bytes) -> frozenset[Pair]:
    """What `wanted_layout` made, or a whole layout, from untrusted bytes. Raises ValueError."""
    if len(layout) > MAX_BYTES:
        raise ValueError(f"a layout of {len(layout)} bytes: at most {MAX_BYTES} are exchanged.")
    try:
        wanted = _decoder.decode(layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed layout: {one_line(str(error), MAX_REASON)}") from None
    if wanted.version != VERSION:
        raise ValueError(
            f"layout version {wanted.version}: this kvpool reads version {VERSION}. Run the same "
            "kvpool on both sides."
        )
    return pairs_of(wanted.regions)
