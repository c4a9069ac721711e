"""The conformance kit's checks of plans and transfers (entry point group `kvpool.testing`).

What must arrive is computed from positions and axis steps, never by the planner. Every value of a
request is a function of its role, layer, position and global axis steps, so that a shard, a page
size or an order on either side changes where it lies and not what it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.digest.digest import digests, pieces
from disagg.plan import plan
from disagg.plan.bind import CopyBatch
from kvpool.layout import Region
from kvpool.layout.formats import Shard
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, fail, random_of
from kvpool.testing.checks.layout import capacity, place
from kvpool.testing.memory import PoolMemory
from kvpool.testing.values import Bytes

Move = Callable[[Sequence["TransferSide"], "TransferSide", Sequence[CopyBatch]], None]


class TransferSide:
    """A pool with all its bytes, and a request in it."""

    def __init__(self, pool: KVPool, tokens: int, name: str) -> None:
        random = random_of(name, tokens)
        self.layout, self.memory = pool.layout, PoolMemory(pool)
        self.address = place(pool.layout, tokens, random)
        self.memory.fill(random)

    def write(self) -> None:
        """Writes the request's values."""
        self._expect_values()
        self.memory.put(self.memory.bytes)

    def check(self) -> None:
        """Fails unless the request's values have arrived and nothing outside its items changed."""
        self._expect_values()
        self.memory.check(free=self._padding())

    def _expect_values(self) -> None:
        tokens = self.address.num_tokens
        for region in self.layout.regions:
            space = self.layout.space_of(region)
            entries = np.array(space.alive(tokens), dtype=np.int64)
            if entries.size:
                numbers, steps = space.place(entries)
                items = self.address.spans[space.id_list].ids[numbers]
                cells = self.memory.cells(region, items * space.steps + steps)
                self.memory.bytes[cells] = _values(region, entries)

    def _padding(self) -> npt.NDArray[np.bool_]:
        """Declared padding in the request's items, and the dead entries of its last pages: a
        transfer may copy or leave them.
        """
        layout, spans = self.layout, self.address.spans
        free = np.zeros(self.memory.bytes.shape, dtype=bool)
        ids = {s.name: spans[s.id_list].ids for s in layout.spaces if s.id_list in spans}
        for buffer in layout.buffers:
            free[self.memory.items(buffer, ids[buffer.space])] = buffer.padding
        for region in layout.regions:
            space = layout.space_of(region)
            locations = ids[space.name][:, None] * space.steps + np.arange(space.steps)
            free[self.memory.cells(region, locations.ravel())] = False
            entries = space.entries_per_item
            filled, live = divmod(space.written(self.address.num_tokens), entries)
            if not space.per_request and live and not space.wraps:
                free[self.memory.cells(region, locations[filled, live:])] = True
        return free


def plans_lead_to_the_host(case: Case) -> None:
    """From the device to host pools of other page sizes, placements and shards."""
    for more in case.others:
        _transfer([case.make()], case.build(**{**more, "device": "cpu"}), _by_numpy)


def plans_lead_from_the_host(case: Case) -> None:
    """From host pools, all shards together, to the device."""
    for more in case.others:
        _transfer(_whole(case, more, "cpu"), case.make(), _by_numpy)


def the_device_copies_the_runs_of_a_plan(case: Case) -> None:
    """Between pools on the device, by its `copy_runs`."""

    def by_device(
        sources: Sequence[TransferSide], dest: TransferSide, batches: Sequence[CopyBatch]
    ) -> None:
        for batch in batches:
            case.device.copy_runs(batch.src, batch.dst, batch.nbytes)

    for more in case.others:
        _transfer([case.make()], case.make(**more), by_device)


def digests_do_not_depend_on_where_bytes_lie(case: Case) -> None:
    """On the device and the host, in other page sizes, placements and shards."""
    for more in case.others:
        pools = case.make(), case.build(**{**more, "device": "cpu"})
        source, dest = (pool.layout for pool in pools)
        tokens = max(1, min(map(capacity, (source, dest))) - 1)
        asked = pieces(plan([source], dest), 0, range(tokens), tokens)
        values = []
        for number, pool in enumerate(pools):
            side = TransferSide(pool, tokens, f"side {number}")
            side.write()
            parts = digests(pool.layout, side.address, asked)
            values.append([value for part in parts if part is not None for value in part.tolist()])
        wrong = [p.key for p, first, second in zip(asked, *values, strict=True) if first != second]
        if wrong:
            owner, layer, role = wrong[0]
            fail(f"{owner} layer {layer} {role}: digests of the same values differ.")


POOL_CHECKS = (
    plans_lead_to_the_host,
    plans_lead_from_the_host,
    the_device_copies_the_runs_of_a_plan,
    digests_do_not_depend_on_where_bytes_lie,
)


def _transfer(sources: Sequence[KVPool], dest: KVPool, move: Move) -> None:
    layouts = [pool.layout for pool in sources]
    tokens = max(1, min(capacity(layout) for layout in [*layouts, dest.layout]) - 1)
    sides = [TransferSide(pool, tokens, f"source {n}") for n, pool in enumerate(sources)]
    dest_side = TransferSide(dest, tokens, "dest")
    for side in sides:
        side.write()
    transfer = plan(layouts, dest.layout)
    batches = transfer.bind_all([side.address for side in sides], dest_side.address)
    if not any(batch.runs for batch in batches):
        fail(f"a plan of {tokens} tokens has no runs.")
    move(sides, dest_side, batches)
    dest_side.check()
    for side in sides:
        side.memory.check()


def _by_numpy(
    sources: Sequence[TransferSide], dest: TransferSide, batches: Sequence[CopyBatch]
) -> None:
    """Copies run by run between the bytes of both sides."""
    written = dest.memory.bytes.copy()
    for side, batch in zip(sources, batches):
        for memory, begin in ((side.memory, batch.src), (dest.memory, batch.dst)):
            memory.number(begin + batch.nbytes - 1)  # a run must end inside memory
        starts = side.memory.number(batch.src), dest.memory.number(batch.dst)
        for src, dst, nbytes in zip(*starts, batch.nbytes):
            written[dst : dst + nbytes] = side.memory.bytes[src : src + nbytes]
    dest.memory.put(written)


def _whole(case: Case, more: Mapping[str, Any], device: str) -> list[KVPool]:
    """Pools that hold all state together: every shard, if `more` names one."""
    size = more["shard"].size if "shard" in more else 0
    parts = [{"shard": Shard(rank, size)} for rank in range(size)] or [{}]
    return [case.build(**{**more, **part, "device": device}) for part in parts]


def _values(region: Region, entries: Ints) -> Bytes:
    """Bytes `[N, axes..., width]` as a function of owner, layer, role, entry and global steps."""
    seed = zlib.crc32(repr(region.key).encode())
    mixed = np.array(seed, dtype=np.uint64)
    steps = [np.arange(axis.start, axis.stop) for axis in region.inner_axes]
    for numbers in (entries, *steps, np.arange(region.width)):
        mixed = (mixed[..., None] ^ numbers.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.array(mixed >> np.uint64(40), dtype=np.uint8)
