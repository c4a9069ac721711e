"""KVPool: memory, layout, sizes, reads and writes, all derived from the declared buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, get_args
from weakref import ReferenceType

from typing_extensions import Self

from kvpool.device import Device, get_device
from kvpool.layout import LayoutError, PoolLayout, Space
from kvpool.layout.describe import describe
from kvpool.layout.dtypes import storage
from kvpool.layout.formats import BufferSpec, Shard
from kvpool.layout.summary import summary
from kvpool.layout.validate import total_layers
from kvpool.pools.access import ArrayLike, DTypeLike, disjoint
from kvpool.pools.budget import fit, needed_items, state_bytes
from kvpool.pools.offload import HostCopies
from kvpool.pools.placement import (
    ITEM_COUNTS,
    Placement,
    count_argument,
    grouped,
    layer_numbers,
    place,
    used_spaces,
)

if TYPE_CHECKING:
    import torch


class Common(TypedDict, total=False):
    """Keyword arguments that every pool takes."""

    layers: Iterable[int]
    total_kv_layers: int | None
    num_pages: int
    num_window_pages: int
    num_slots: int
    requests: int | None
    chunk_tokens: int
    page_size: int
    dtype: DTypeLike | None
    packing: DTypeLike | None
    device: str
    shard: Shard
    placement: Placement
    owner: str
    own_spaces: bool
    model: str


class KVPool(HostCopies):
    """A subclass defines `declare()` (and `spaces()`); everything else is derived here.

    `layers` are global ids, any subset, from `start_layer` to `end_layer` - 1; `total_kv_layers`
    counts those of the target model, and may be left out where `layers` are all of them, 0 to n-1.
    `nbytes` are the bytes allocated. `page_size` is in tokens. `num_pages` counts pages of tokens,
    `num_window_pages` those of sliding windows, `num_slots` slots and rings, one per request; item
    0 of each is reserved for padding. The last two may be left out where `requests` is given: as
    many as so many requests need at a time that are extended by `chunk_tokens` tokens at most.
    `dtype` is that of values written and read, `packing` how they are stored: a float dtype (then
    also `dtype`), `"fp8"` or `"mxfp8"`.
    `placement="page"` puts all layers of a page side by side, `"stack"` all layers of a buffer one
    after the other. `"block"` makes the pool one block pool: pages, window pages, slots and rings
    are blocks of equal bytes from one free list, of which `num_pages` counts them all; layers may
    be in several groups, each with ids of its own (kvpool.pools.placement). `own_spaces` prefixes
    space names with the owner: a draft that cannot share the target's ids has its own.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        page_size: int,
        num_pages: int = 0,
        num_window_pages: int = 0,
        num_slots: int = 0,
        requests: int | None = None,
        chunk_tokens: int = 1,
        dtype: DTypeLike | None = None,
        packing: DTypeLike | None = None,
        total_kv_layers: int | None = None,
        device: str = "cpu",
        shard: Shard = Shard(),
        placement: Placement = "layer",
        owner: str = "target",
        own_spaces: bool = False,
        model: str = "",
    ) -> None:
        self.layers = layer_numbers(layers, owner)
        self.start_layer, self.end_layer = self.layers[0], self.layers[-1] + 1
        placements = get_args(Placement)
        if placement not in placements:
            raise ValueError(f"{owner} placement: one of {placements}, got {placement!r}.")
        if page_size < 1:
            raise ValueError(f"{owner} page_size: 1 or more, got {page_size}.")
        self.page_size, self.placement, self.owner, self.shard = page_size, placement, owner, shard
        self.num_pages, self.num_window_pages = num_pages, num_window_pages
        self.num_slots = num_slots
        self.dtype, self.packing = storage(dtype, packing, owner)
        self.total_kv_layers = total_layers(total_kv_layers, self.layers, self.owner)
        self.device: Device = get_device(str(device))
        self.specs, spaces = self._declared(f"{owner}." if own_spaces else "")
        if requests is not None:
            needed = needed_items(spaces.values(), requests, 0, chunk_tokens)
            self.num_window_pages = num_window_pages or needed.get("num_window_pages", 0)
            self.num_slots = num_slots or needed.get("num_slots", 0)
        self.layout = self._allocated(spaces, model)
        for region in self.layout.regions:
            self._cells_of(region)  # raises where it is not aligned
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self.allocator: ReferenceType[Any] | None = None  # set by Allocator

    def __repr__(self) -> str:
        """One line; `layout.explain()` has every region."""
        model = f"{self.layout.model}, " if self.layout.model else ""
        return f"{type(self).__name__}({model}{summary(self.layout)})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self.layout._repr_html_()

    def _declared(self, names: str) -> tuple[tuple[BufferSpec, ...], dict[str, Space]]:
        """Specifications and the spaces that they use, by name with prefix `names`."""
        declared = tuple(
            replace(spec, space=names + spec.space) for spec in self.declare() if spec.layers
        )
        spaces = used_spaces({spec.space for spec in declared}, names, self.spaces())
        if self.placement == "block":
            return grouped(declared, spaces, f"{names}blocks")
        return declared, spaces

    def _allocated(self, spaces: Mapping[str, Space], model: str) -> PoolLayout:
        """Allocates the memory; returns what lies where."""
        items = {space.name: self._items(spaces[space.id_list]) for space in spaces.values()}
        buffers, self.nbytes = place(self, spaces, items, self.device.alignment)
        self._base = start = 0
        memory = self.device.memory_kind
        if self.device.memory_kind != "meta":
            start, memory = self._slab.data_ptr(), str(self._slab.device)
            # views count from the start of the storage; an aligned slab may begin later
            self._base = start - int(self._slab.storage_offset())
        return PoolLayout(
            buffers=tuple(replace(b, base=start + b.base, memory=memory) for b in buffers),
            regions=tuple(region for spec in self.specs for region in spec.regions(self.owner)),
            spaces=tuple(spaces.values()),
            total_kv_layers=self.total_kv_layers,
            model=model,
        )

    @classmethod
    def from_budget(
        cls,
        nbytes: int,
        *,
        weights: int = 0,
        utilisation: float = 1.0,
        requests: int = 1,
        chunk_tokens: int = 1,
        **arguments: Any,
    ) -> Self:
        """A pool with as many pages as fit into `nbytes`, besides a slot and window pages (for
        chunks of `chunk_tokens`) for each of `requests` requests.

        With `weights` (bytes) and `utilisation` (a fraction), `nbytes` is the device's memory, of
        which state gets `nbytes * utilisation - weights`:
        `MLAPool.from_budget(141 << 30, weights=80 << 30, utilisation=0.9, layers=..., ...)`.

        Other arguments are those of the class. Raises ValueError if no page of tokens fits, and
        TypeError for bytes that are no number (`kvpool.models.sizing.parse_memory` reads `80GiB`).
        """
        step = get_device(str(arguments.get("device", "cpu"))).alignment
        small = dict.fromkeys(ITEM_COUNTS, 2)
        counted = sorted(set(small) & set(arguments))
        if counted:
            raise ValueError(f"{', '.join(counted)}: from_budget computes them. Leave them out.")
        probe = cls(**{**arguments, **small, "device": "meta"})
        state = state_bytes(nbytes, weights, utilisation, probe.owner)
        counts = fit([probe], state, requests, chunk_tokens, step=step, where=probe.owner)
        return cls(**{**arguments, **counts})

    def declare(self) -> Iterator[BufferSpec]:
        """The pool's buffers. A new pool must define this, and nothing else."""
        raise TypeError(f"{type(self).__name__} needs a declare() method.")

    def spaces(self) -> Iterator[Space]:
        """The spaces of declared buffers, and those whose ids they share."""
        yield Space("kv", "paged", entries_per_item=self.page_size)

    def space_of(self, role: str, layer: int) -> Space:
        """The space whose locations address a role of a layer. Raises KeyError as `view` does."""
        return self.layout.space_of(self._region(role, layer))

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes of each further token; windows, slots and rings do not grow. Blocks count whole."""
        spaces = self.layout.space_by_name
        grow = [b for b in self.layout.buffers if spaces[b.space].grows]
        if self.placement == "block":
            lists = {spaces[b.space].id_list: b for b in grow}
            return sum(b.item_stride / spaces[b.space].tokens_per_item for b in lists.values())
        return sum(b.item_bytes / spaces[b.space].tokens_per_item for b in grow)

    def copy_items(self, space: str, src: ArrayLike, dst: ArrayLike) -> None:
        """Copies items `src` `[N]` of an id list to items `dst` `[N]`, in all of its buffers, also
        those of spaces that share its ids. Raises IndexError for ids that are out of range, and
        ValueError if several requests or the prefix cache need an item of `dst` (ids on a device
        are not read back for that). Ids name no request: whether a room reads or writes an item is
        not checked.
        """
        items, spaces = self.layout.items_by_list, self.layout.space_by_name
        if space not in items:
            names = sorted(items)
            raise KeyError(f"{self.owner} space {space!r}: this pool has id lists {names}.")
        sources, targets = (self._ids(f"item of {space}", ids, items[space]) for ids in (src, dst))
        if sources.numel() != targets.numel():
            raise ValueError(f"space {space}: {len(sources)} source items, {len(targets)} targets.")
        allocator = None if self.allocator is None else self.allocator()
        if allocator is not None and targets.device.type == "cpu":
            allocator.check_unshared(space, targets.numpy())
        buffers = (b for b in self.layout.buffers if spaces[b.space].id_list == space)
        views = [self.item_bytes_view(buffer) for buffer in buffers]
        self.device.copy_items(views, sources, targets, disjoint=disjoint(src, dst))

    def check_integrity(self) -> None:
        """Raises LayoutError where the description of a typed view differs from the layout."""
        for region in self.layout.regions:
            view = self.view(region.role, region.layer)
            dims = ("item", *(axis.name for axis in region.axes), "cell")
            shards = {axis.name: (axis.start, axis.total) for axis in region.axes}
            seen = describe(
                view,
                dims,
                role=region.role,
                layer=region.layer,
                owner=region.owner,
                cell="cell",
                shards=shards,
                buffer=self.layout.buffer_of(region),
            ).regions[0]
            if seen != region:
                raise LayoutError(f"{region}: the layout says {region!r}, the memory {seen!r}.")

    def _items(self, list_space: Space) -> int:
        """Items of the id list that `list_space` owns."""
        name, reserved = count_argument(list_space), list_space.reserved
        value: int = getattr(self, name)
        if value <= reserved:
            derived = "" if list_space.grows else " With requests=N they may be left out."
            raise ValueError(
                f"{self.owner} {name}: {reserved + 1} or more, got {value}. Item 0 of space "
                f"{list_space.name!r} is reserved for padding.{derived}"
            )
        return value
