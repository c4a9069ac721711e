"""What the bytes of a pool are: the description from which everything else is derived.

The pointer to byte `b` at axis steps `a` of a region, in item `i` of its buffer, is

    buffer.base + i * buffer.item_stride + region.offset + sum(a[k] * axis[k].stride) + b

with `0 <= b < region.width`. All types are frozen and validated at construction. numpy and msgspec
are enough: routers and planners read layouts without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.layout.grid import Ints, merge_intervals
from kvpool.layout.request_address import Holder, Pin, RequestAddress, RequestPinned, Span
from kvpool.layout.spaces import Interleave, Space
from kvpool.layout.summary import explain, html, summary
from kvpool.layout.types import Axis, Buffer, Described, Key, LayoutError, Region, Slab
from kvpool.layout.validate import VERSION, check_layout, total_layers

__all__ = ["VERSION", "Axis", "Buffer", "Described", "Holder", "Interleave", "Key", "LayoutError"]
__all__ += ["Pin", "PoolLayout", "Region", "RequestAddress", "RequestPinned", "Slab", "Space"]
__all__ += ["Span"]

MEMORY_PAGE_BYTES = 4096


@dataclass(frozen=True)
class PoolLayout:
    """All buffers, regions and spaces of one pool (or of target and draft merged) on one rank.

    Raises LayoutError, naming owner, layer and role, where regions overlap, exceed their item or do
    not fit their space. `total_kv_layers` counts the target model's layers; `generation` is a
    random id of the endpoint's life.
    """

    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]
    spaces: tuple[Space, ...]
    total_kv_layers: int
    model: str = ""
    generation: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("buffers", "regions", "spaces"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_layout(self)

    def __repr__(self) -> str:
        """One line; `explain()` has every region."""
        return f"PoolLayout({f'{self.model}, ' if self.model else ''}{summary(self)})"

    def explain(self) -> str:
        """A line for each role and shape: layers, type, bytes, axes."""
        return explain(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html(self)

    @cached_property
    def buffer_by_name(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def space_by_name(self) -> dict[str, Space]:
        return {space.name: space for space in self.spaces}

    @cached_property
    def region_by_key(self) -> dict[Key, Region]:
        return {region.key: region for region in self.regions}

    @property
    def regions_in(self) -> dict[str, list[Region]]:
        """The regions of each buffer, by its name. Not kept: of many layouts it would add up."""
        regions: dict[str, list[Region]] = {buffer.name: [] for buffer in self.buffers}
        for region in self.regions:
            regions[region.buffer].append(region)
        return regions

    @cached_property
    def items_by_space(self) -> dict[str, int]:
        """Items that every buffer of a space has, by space name."""
        items: dict[str, int] = {}
        for buffer in self.buffers:
            items[buffer.space] = min(items.get(buffer.space, buffer.items), buffer.items)
        return items

    @property
    def items_by_list(self) -> dict[str, int]:
        """Items that every buffer of an id list has, by its name."""
        items: dict[str, int] = {}
        for name, count in self.items_by_space.items():
            id_list = self.space_by_name[name].id_list
            items[id_list] = min(items.get(id_list, count), count)
        return items

    @cached_property
    def packed_spaces(self) -> dict[str, Region]:
        """Of each space in which regions are packed, by its name, one of them."""
        return {self.space_of(region).name: region for region in self.regions if region.packing}

    @cached_property
    def block_pools(self) -> dict[str, tuple[str, ...]]:
        """The id lists whose ids come from one pool of blocks, by its name."""
        pools: dict[str, list[str]] = {}
        for space in self.spaces:
            if space.block_pool is not None:
                pools.setdefault(space.block_pool, []).append(space.name)
        return {pool: tuple(lists) for pool, lists in pools.items()}

    @cached_property
    def adjacent_buffers(self) -> list[list[Buffer]]:
        """Groups of buffers whose items lie side by side within one stride, in memory order."""
        groups: list[list[Buffer]] = []
        for buffer in sorted(self.buffers, key=lambda b: (b.space, b.memory, b.base)):
            first = groups[-1][0] if groups else None
            if (
                first is not None
                and (first.space, first.memory) == (buffer.space, buffer.memory)
                and (first.item_stride, first.items) == (buffer.item_stride, buffer.items)
                and buffer.base + buffer.item_bytes <= first.base + first.item_stride
                # pools on the meta device all begin at 0: merged, they lie over one another
                and buffer.base >= groups[-1][-1].base + groups[-1][-1].item_bytes
            ):
                groups[-1].append(buffer)
            else:
                groups.append([buffer])
        return groups

    def covers(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """For each range of pointers `[N]` whether it lies in buffers that have no foreign bytes:
        described or declared padding throughout. No pointer may be in two memories.
        """
        first, end = self._stretches
        stretch = np.searchsorted(first, starts, side="right") - 1
        covered: npt.NDArray[np.bool_] = ends <= end[stretch]
        return covered

    @cached_property
    def _stretches(self) -> tuple[Ints, Ints]:
        """Sorted intervals of pointers, all of whose bytes are in regions or declared padding."""
        described = {name: sum(r.nbytes for r in rows) for name, rows in self.regions_in.items()}
        stretches = [(-1, -1)]  # before all pointers
        for group in self.adjacent_buffers:
            first, last = group[0], group[-1]
            sizes = [b.item_bytes for b in group if b.padding or described[b.name] == b.item_bytes]
            reach = last.base + last.item_bytes - first.base
            if sum(sizes) == (first.item_stride if first.items > 1 else reach):
                stretches.append((first.base, last.end))
        starts, ends = np.array(stretches, dtype=np.int64).T
        return merge_intervals(starts, ends)

    def share(self, other: PoolLayout) -> None:
        """Keeps the regions and spaces of another layout in place of its own, which are equal: of
        many layouts that differ in pointers they then take memory once. Raises ValueError.
        """
        if self.regions != other.regions or self.spaces != other.spaces:
            raise ValueError("layouts share regions and spaces that are equal.")
        object.__setattr__(self, "regions", other.regions)
        object.__setattr__(self, "spaces", other.spaces)
        self.__dict__["region_by_key"] = other.region_by_key

    def buffer_of(self, region: Region) -> Buffer:
        return self.buffer_by_name[region.buffer]

    def space_of(self, region: Region) -> Space:
        """The space whose ids address a region's items."""
        return self.space_by_name[self.buffer_of(region).space]

    def items_per_block(self, buffer: Buffer) -> int:
        """How many items of a buffer are one block of its block pool."""
        return self.space_by_name[self.space_by_name[buffer.space].id_list].items_per_block

    def by_blocks(self, buffer: Buffer) -> Buffer:
        """A buffer with the blocks of its block pool as items, each from the first byte of its
        first item to the last byte of its last.
        """
        size = self.items_per_block(buffer)
        return replace(
            buffer,
            item_stride=size * buffer.item_stride,
            item_bytes=(size - 1) * buffer.item_stride + buffer.item_bytes,
            items=buffer.items // size,
        )

    def live_bytes(self, tokens: int) -> int:
        """Live bytes of a request, without padding. Of a packed region, items count whole."""
        live = 0
        for region in self.regions:
            space = self.space_of(region)
            if region.packing:
                live += region.nbytes * len(space.alive_items(tokens))
            else:
                live += region.nbytes // space.steps * len(space.alive(tokens))
        return live

    def slabs(self) -> list[Slab]:
        """The memory to register for all buffers, no byte twice; those that touch are one slab."""
        slabs: list[Slab] = []
        for buffer in sorted(self.buffers, key=lambda b: (b.memory, b.base)):
            last = slabs[-1] if slabs else None
            # a gap smaller than a page lies in pages that are registered anyway
            if last and last.memory == buffer.memory and buffer.base < last.end + MEMORY_PAGE_BYTES:
                slabs[-1] = Slab(last.base, max(last.end, buffer.end) - last.base, last.memory)
            else:
                slabs.append(Slab(buffer.base, buffer.end - buffer.base, buffer.memory))
        return slabs

    def fingerprint(self) -> str:
        """Hex digest of everything but pointers, with which buffers lie side by side: equal for
        equal pools of two processes, whose plans differ in pointers only. Computed once.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        from kvpool.layout.codec import fingerprint

        return fingerprint(self)

    def to_msgpack(self) -> bytes:
        """Bytes that `from_msgpack` reads back exactly. Raises LayoutError above 8 MiB."""
        from kvpool.layout import codec

        return codec.bounded(codec.encode(self))

    def to_json(self) -> str:
        """Text that `from_json` reads back exactly. Raises LayoutError above 8 MiB."""
        from kvpool.layout import codec

        return codec.bounded(codec.encode_json(self)).decode()

    @staticmethod
    def from_msgpack(data: bytes) -> PoolLayout:
        """Reads untrusted bytes; raises LayoutError with the reason."""
        from kvpool.layout import codec

        return codec.decode(data, msgspec.msgpack.decode)

    @staticmethod
    def from_json(text: str | bytes) -> PoolLayout:
        """Reads untrusted text; raises LayoutError with the reason."""
        from kvpool.layout import codec

        return codec.decode(text, msgspec.json.decode)

    @staticmethod
    def of(
        *described: Described,
        spaces: Iterable[Space],
        total_kv_layers: int | None = None,
        model: str = "",
    ) -> PoolLayout:
        """One layout of all that `describe(...)` returned for a rank's tensors; `spaces` are those
        that they name. `total_kv_layers` may be left out where the target's layers are 0 to n - 1.

            k = describe(keys, ("item", "entry", "head", "dim"), role="k", layer=0)
            v = describe(values, ("item", "entry", "head", "dim"), role="v", layer=0)
            PoolLayout.of(k, v, spaces=[Space("kv", entries_per_item=16)])

        Raises LayoutError, naming what does not fit, and TypeError for what is no description.
        """
        joined = Described.join(described)
        owners = {region.owner for region in joined.regions}
        owner = "target" if "target" in owners or not owners else min(owners)
        layers = sorted({region.layer for region in joined.regions if region.owner == owner})
        total = total_layers(total_kv_layers, layers, owner)
        return PoolLayout(
            buffers=joined.buffers,
            regions=joined.regions,
            spaces=tuple(spaces),
            total_kv_layers=total,
            model=model,
        )

    @staticmethod
    def merge(first: PoolLayout, *others: PoolLayout) -> PoolLayout:
        """A target's layout and its drafts' as one. Spaces with the same name share ids and must be
        equal. `total_kv_layers`, `model` and `generation` are those of `first`.
        """
        layouts: Sequence[PoolLayout] = (first, *others)
        spaces: dict[str, Space] = {}
        for layout in layouts:
            for space in layout.spaces:
                shared = spaces.setdefault(space.name, space)
                if shared != space:
                    raise LayoutError(
                        f"space {space.name}: {shared} and {space} cannot share ids. Build both "
                        "pools with the same page sizes, windows, rings and block pools, or the "
                        "draft with own_spaces=True."
                    )
        return replace(
            first,
            buffers=tuple(buffer for layout in layouts for buffer in layout.buffers),
            regions=tuple(region for layout in layouts for region in layout.regions),
            spaces=tuple(spaces.values()),
        )


def need_layouts(layouts: object, sentence: str) -> None:
    """Raises TypeError with that sentence unless these are layouts, several or none."""
    if not isinstance(layouts, Iterable) or any(not isinstance(x, PoolLayout) for x in layouts):
        raise TypeError(sentence)
