"""KVPool: memory, layouts, sizes, reads and writes, all derived from what a pool declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch

from kvpool.bufinfos import BufInfos, StateBufInfos
from kvpool.describe import describe
from kvpool.device import Device, get_device
from kvpool.dtypes import ITEMSIZE, dtype_name
from kvpool.item import item_regions
from kvpool.layout import VERSION, Buffer, LayoutError, PoolLayout, Region, Space
from kvpool.placement import PLACEMENTS, Declared, buffer_name, place


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts of what is sharded."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of `total` steps that this part holds; with fewer steps than parts, parts
        are replicas.
        """
        if total % self.size == 0:
            return self.rank * (total // self.size), total // self.size
        if self.size % total == 0:
            return self.rank // (self.size // total), 1
        raise ValueError(
            f"shard: {total} heads cannot be split over {self.size} ranks. One must divide the "
            "other."
        )


class Common(TypedDict, total=False):
    """Keyword arguments that every pool takes."""

    layers: Iterable[int]
    total_kv_layers: int | None
    num_pages: int
    page_size: int
    dtype: Any
    device: str
    shard: Shard
    placement: str
    owner: str
    model: str


class KVPool:
    """A pool is its declaration; everything else is derived here.

    `layers` are global ids, in any subset; `num_pages` counts page 0, which is reserved for
    padding; `page_size` is tokens a page; `placement="page"` puts all layers of a page side by
    side.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        num_pages: int,
        page_size: int,
        dtype: Any,
        total_kv_layers: int | None = None,
        device: str = "cpu",
        shard: Shard = Shard(),
        placement: str = "layer",
        owner: str = "target",
        model: str = "",
    ) -> None:
        self.layers = tuple(sorted(layers))
        if not self.layers or len(set(self.layers)) != len(self.layers) or self.layers[0] < 0:
            raise ValueError(f"{owner} layers: distinct numbers from 0, got {list(self.layers)}.")
        if placement not in PLACEMENTS:
            raise ValueError(f"{owner} placement: one of {PLACEMENTS}, got {placement!r}.")
        for name, value, least in (("num_pages", num_pages, 2), ("page_size", page_size, 1)):
            if value < least:
                raise ValueError(
                    f"{owner} {name}: {least} or more, got {value}. Page 0 is reserved for padding."
                )
        self.num_pages, self.page_size, self.placement = num_pages, page_size, placement
        self.dtype, self.owner, self.shard = dtype_name(dtype), owner, shard
        self.total_kv_layers = self.layers[-1] + 1 if total_kv_layers is None else total_kv_layers
        if owner == "target" and self.total_kv_layers <= self.layers[-1]:
            raise ValueError(
                f"{owner} total_kv_layers: {self.total_kv_layers}, but layer {self.layers[-1]} is "
                "held."
            )
        self.device: Device = get_device(str(device))
        self._declared = tuple(self.declare())
        spaces = {space.name: space for space in self.spaces()}
        buffers, nbytes = place(
            self._declared,
            {name: self.items(space) for name, space in spaces.items()},
            owner=owner,
            placement=placement,
            step=self.device.alignment,
        )
        with torch.inference_mode(False):
            self._slab = self.device.allocate(nbytes)
        base = 0 if self._slab.device.type == "meta" else self._slab.data_ptr()
        memory = str(self._slab.device)
        self.layout = PoolLayout(
            version=VERSION,
            buffers=tuple(replace(b, base=base + b.base, memory=memory) for b in buffers),
            regions=tuple(
                region
                for part in self._declared
                for layer in part.layers
                for region in item_regions(
                    part.item,
                    owner=owner,
                    layer=layer,
                    buffer=buffer_name(owner, part.name, layer),
                )
            ),
            spaces=tuple(spaces.values()),
            total_kv_layers=self.total_kv_layers,
            model=model,
        )
        self._base = base
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    def declare(self) -> Iterator[Declared]:
        """The pool's buffers, kind by kind. The only thing that a new pool must say."""
        raise TypeError(f"{type(self).__name__} declares no buffers: define declare().")

    def spaces(self) -> Iterator[Space]:
        """Spaces that the declared buffers name."""
        yield Space("kv", "paged", entries_per_item=self.page_size)

    def items(self, space: Space) -> int:
        """How many items the buffers of a space have."""
        return self.num_pages

    @property
    def start_layer(self) -> int:
        """First layer held here."""
        return self.layers[0]

    @property
    def end_layer(self) -> int:
        """First layer after those held here."""
        return self.layers[-1] + 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._slab.numel()

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes that one more token takes in the paged spaces of this rank."""
        spaces = self.layout.space_by_name
        paged = (b for b in self.layout.buffers if spaces[b.space].kind == "paged")
        return sum(b.item_bytes / spaces[b.space].tokens_per_item for b in paged)

    @property
    def kv_buf_groups(self) -> int:
        """Kinds of buffers in the contiguous listing."""
        return sum(1 for part in self._declared if part.space == "kv")

    def get_contiguous_buf_infos(self) -> BufInfos:
        """The main buffers of the `kv` space, kind by kind: `address = ptr + page * item_len`."""
        if self.placement == "page":
            raise ValueError(
                f"{self.owner}: with placement='page' the layers of a page lie side by side, so "
                "that no pointer and "
                "item length per layer can say where they are. Read pool.layout, or build with "
                "placement='layer'."
            )
        rows = [
            (self.layout.buffer_by_name[buffer_name(self.owner, part.name, layer)], layer)
            for part in self._declared
            if part.space == "kv"
            for layer in part.layers
        ]
        return BufInfos(
            [b.base for b, _ in rows],
            [b.end - b.base for b, _ in rows],
            [b.item_bytes for b, _ in rows],
            [layer for _, layer in rows],
        )

    def get_state_buf_infos(self) -> list[StateBufInfos]:
        """One entry per state component beside the main cache; `[]` where there is none."""
        return []

    def view(self, role: str, layer: int) -> torch.Tensor:
        """The bytes of a role as a typed strided tensor `[item, entry, axes..., element]` (no entry
        in slots).
        """
        found = self._views.get((role, layer))
        if found is None:
            region = self.layout.region_by_key.get((self.owner, layer, role))
            if region is None:
                held = sorted({r.role for r in self.layout.regions if r.layer == layer})
                raise KeyError(
                    f"{self.owner} layer {layer} {role}: not held here (roles of that layer: "
                    f"{held})."
                )
            with torch.inference_mode(False):  # a view made in inference mode could not be written
                found = _view(self._slab, region, self.layout.buffer_of(region), self._base)
            self._views[role, layer] = found
        return found

    def store(self, layer: int, locations: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Writes values `[N, ...]` by role to flat entry locations `[N]`, all roles or none.

        A location is `item * entries_per_item + entry`. Raises ValueError where shape or dtype are
        not the pool's: nothing is broadcast or rounded.
        """
        rows = []
        for role, given in values.items():
            view, where = self.view(role, layer), self._locations(role, layer, locations)
            shape = (where.numel(), *view.shape[2:])
            if (tuple(given.shape), given.dtype) != (shape, view.dtype):
                raise ValueError(
                    f"{self.owner} layer {layer} {role}: values {tuple(given.shape)} "
                    f"{given.dtype}, the pool takes {shape} {view.dtype}. Reshape or convert them "
                    "first."
                )
            rows.append((view, where, given.detach()))
        for row in rows:
            self.device.store(*row)

    def load(self, role: str, layer: int, locations: Any) -> torch.Tensor:
        """Reads flat entry locations `[N]` into a new tensor `[N, ...]`."""
        return self.device.load(self.view(role, layer), self._locations(role, layer, locations))

    def check_integrity(self) -> None:
        """Describes every view back and compares it with the layout; raises LayoutError where they
        differ.
        """
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

    def _locations(self, role: str, layer: int, locations: Any) -> torch.Tensor:
        view = self.view(role, layer)
        numpy = isinstance(locations, np.ndarray)
        flat = torch.from_numpy(locations) if numpy else torch.as_tensor(locations)
        whole = not flat.is_floating_point() and flat.dtype is not torch.bool
        if flat.dim() != 1 or (flat.numel() and not whole):
            raise ValueError(
                f"{self.owner} layer {layer} {role}: locations {list(flat.shape)} {flat.dtype}. "
                "Give a flat list of integers."
            )
        if flat.numel() and view.device.type == "cpu":
            low, high, end = int(flat.min()), int(flat.max()), view.shape[0] * view.shape[1]
            if low < 0 or high >= end:
                wrong = low if low < 0 else high
                raise IndexError(f"{self.owner} layer {layer} {role}: location {wrong} of {end}.")
        return flat.to(view.device, torch.int64)


def _view(slab: torch.Tensor, region: Region, buffer: Buffer, base: int) -> torch.Tensor:
    size = ITEMSIZE[region.dtype]
    steps = [
        (buffer.items, buffer.item_stride),
        *((a.size, a.stride) for a in region.axes),
        (region.width // size, size),
    ]
    start = buffer.base - base + region.offset
    if start % size or any(stride % size for _, stride in steps):
        raise LayoutError(
            f"{region}: {region.dtype} at byte {start} with strides {steps} is not aligned to "
            f"{size} bytes."
        )
    return slab.view(getattr(torch, region.dtype)).as_strided(
        [count for count, _ in steps], [stride // size for _, stride in steps], start // size
    )
