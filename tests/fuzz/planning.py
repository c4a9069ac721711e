"""A peer's layouts and block table against one's own: no run of a batch leaves either's items."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

import msgspec
import numpy as np

from disagg.plan import CopyBatch, IncompatibleLayouts, IncompleteTransfer, plan
from disagg.plan.cache import PlanCache
from disagg.protocol import codec, messages
from kvpool.layout import LayoutError, PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, merge_intervals, region_runs
from tests.fuzz import build, edits, samples
from tests.fuzz.guard import Finding
from tests.fuzz.stretch import stretched

MAX_PEERS = 3
_cache = PlanCache(capacity=8)


class Offer(msgspec.Struct, array_like=True):
    """An input: the number of one's own layout, and what the peers send."""

    own: int
    layouts: list[bytes]
    readies: list[bytes]


def run(data: bytes) -> str:
    try:
        offer = msgspec.msgpack.decode(data, type=Offer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "no input"
    own = samples.CASES[offer.own % len(samples.CASES)].own
    try:
        peers = [PoolLayout.from_msgpack(each) for each in offer.layouts[:MAX_PEERS]]
        hits = _cache.hits
        made = _cache.plan(peers, own)
        fresh = plan(peers, own) if _cache.hits > hits else made
    except LayoutError:
        return "no layout"
    except (IncompatibleLayouts, TypeError):  # TypeError: no layout at all
        return "not planned"
    dest = samples.address(own)
    outcome = "planned"
    for source, data in enumerate(offer.readies[: len(peers)]):
        try:
            ready = codec.decode(data)
            if not isinstance(ready, messages.ChunkReady):
                continue
            address = ready.block_table()
            meant = {"tokens": range(ready.start, ready.stop)}
            if some := ready.layers:
                meant |= {"layers": some.layers, "owner": some.owner}
            batch = made.bind(source, address, dest, **meant)
        except (IncompleteTransfer, ValueError):
            continue
        outcome = "bound" if batch.runs else outcome
        check(batch, peers[source], address, own, dest)
        if fresh is not made:
            again = fresh.bind(source, address, dest, **meant)
            if sorted(zip(*batch)) != sorted(zip(*again)):
                raise Finding("a cached plan moves other bytes than a new one.")
    return outcome


def check(
    batch: CopyBatch,
    theirs: PoolLayout,
    source: RequestAddress,
    own: PoolLayout,
    dest: RequestAddress,
) -> None:
    """Raises Finding if a run leaves the request's items on either side, covers bytes of them that
    nobody described, or overlaps another.
    """
    for whose, layout, address, first in (
        ("source", theirs, source, batch.src),
        ("destination", own, dest, batch.dst),
    ):
        starts, ends = described(layout, address)
        place = np.searchsorted(starts, first, side="right") - 1
        beyond = (place < 0) | (first + batch.nbytes > ends[place])
        if (beyond | (batch.nbytes < 1)).any():
            raise Finding(f"a run covers bytes of the {whose} that nobody described.")
    ordered = sorted(zip(batch.dst.tolist(), (batch.dst + batch.nbytes).tolist()))
    if any(one[1] > two[0] for one, two in pairwise(ordered)):
        raise Finding("a byte of the destination is written twice.")


def described(layout: PoolLayout, address: RequestAddress) -> tuple[Ints, Ints]:
    """Pointers from and to which bytes of the request's items are in regions or declared padding,
    joined where adjacent.
    """
    starts, ends = [np.array([-1])], [np.array([-1])]  # before all pointers
    for buffer in layout.buffers:
        ids = address.spans.get(layout.space_by_name[buffer.space].id_list)
        if ids is None:
            continue
        bases = buffer.base + ids.ids[ids.ids < buffer.items] * buffer.item_stride
        runs = [region_runs(region) for region in layout.regions_in.get(buffer.name, ())]
        if buffer.padding or not runs:
            runs = [(np.zeros(int(buffer.padding), np.int64), buffer.item_bytes)]
        # joined before they are repeated for each item: there may be 100,000 of a small document
        low = np.concatenate([offsets for offsets, _ in runs])
        high = np.concatenate([offsets + width for offsets, width in runs])
        for edges, offsets in zip((starts, ends), merge_intervals(low, high)):
            edges.append((bases[:, None] + offsets).ravel())
    return merge_intervals(np.concatenate(starts), np.concatenate(ends))


def seeds() -> Iterator[bytes]:
    for number, case in enumerate(samples.CASES):
        for peers in case.peers:
            layers = {"owner": "target", "start": 0, "stop": 1}
            for start, stop, some in (
                (0, samples.TOKENS, None),
                (5, samples.TOKENS, None),
                (0, samples.TOKENS, layers),
                (0, 9, layers),
            ):
                readies = [ready(peer, start, stop, {"layers": some}) for peer in peers]
                yield build.packed([number, [peer.to_msgpack() for peer in peers], readies])


def ready(
    peer: PoolLayout, start: int, stop: int, about: Mapping[str, object] = MappingProxyType({})
) -> bytes:
    """A peer's ChunkReady of positions `start` to `stop`; `about` names the room."""
    address = samples.address(peer)
    fields = {"start": start, "stop": stop, "last": stop == samples.TOKENS, "layers": None}
    fields |= {"num_tokens": address.num_tokens, "spans": messages.spans_of(address)}
    fields |= {"aux": codec.pack_aux({}), **about}
    return build.packed(build.message(messages.ChunkReady, build.Seeded(0), **fields))


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """Edits what the peers send and leaves the frame around it intact."""
    try:
        offer = msgspec.msgpack.decode(data, type=Offer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return edits.mutate(data, source, most)
    parts = source.choice((offer.layouts, offer.layouts, offer.readies))
    if parts:
        at = source.randrange(len(parts))
        if parts is offer.layouts and source.random() < 0.3:
            held = source.choice(source.choice(samples.CASES[offer.own % len(samples.CASES)].peers))
            parts[at] = stretched(held, build.Seeded(source.getrandbits(32)))
        else:
            parts[at] = edits.mutate(parts[at], source, most // 2)
    return build.packed(offer)[:most]
