"""Access to a pool's memory: typed reads and writes of entries, by role and flat location, and
pointer lists, as connectors of serving engines take them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from kvpool.device import Device
from kvpool.extras import Lazy
from kvpool.layout import Buffer, LayoutError, PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE, PACKINGS
from kvpool.layout.formats import BufferSpec, StateType, scale_role
from kvpool.layout.grid import StateSection, sharded
from kvpool.layout.text import nearest
from kvpool.pools.placement import Placement

# a layout needs no tensor: PyTorch is imported with the first one
if TYPE_CHECKING:
    import torch

    from kvpool.device import quant, torch_ops
    from kvpool.device.torch_ops import WriteRow
else:
    torch = Lazy("torch", "kvpool.pools")
    quant = Lazy("kvpool.device.quant", "kvpool.pools")
    torch_ops = Lazy("kvpool.device.torch_ops", "kvpool.pools")

ArrayLike = Union[npt.ArrayLike, "torch.Tensor"]
DTypeLike = Union[str, "torch.dtype"]


class BufInfos(NamedTuple):
    """Pointers, lengths and item lengths in bytes, and global layer ids, of each buffer."""

    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]


class StateBufInfos(NamedTuple):
    """One state component, as BufInfos, and how each of its buffers is sharded.

    `dim_per_tensor`: steps of the sharded dimension here, heads or channels; 0 without one.
    `sections`: what they consist of, in order. `outer_counts`: how many times an item repeats them
    (taps before channels, entries before heads).
    """

    state_type: StateType
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]
    dim_per_tensor: list[int]
    sections: list[list[StateSection]]
    outer_counts: list[int]


class TypedAccess:
    """Typed access to a pool's memory.

    A location is `item * entries_per_item + entry`, or the item where there are no entries (slots).
    Of pages with a ring it is `item * steps + entry % steps`.
    """

    layout: PoolLayout
    specs: tuple[BufferSpec, ...]
    device: Device
    owner: str
    dtype: str
    packing: str
    placement: Placement
    nbytes: int
    _base: int
    _views: dict[tuple[str, int], torch.Tensor]

    @cached_property
    def _slab(self) -> torch.Tensor:
        """The pool's memory, uint8 `[byte]`, allocated at its first use."""
        with torch.inference_mode(False):  # else it could not be written
            return self.device.allocate(self.nbytes)

    def view(self, role: str, layer: int) -> torch.Tensor:
        """A role's memory as a typed view `[item, entry, axes..., element]` (slots: no entry)."""
        if (role, layer) not in self._views:
            region = self._region(role, layer)
            start, strides = self._cells_of(region)
            items, size = self.layout.buffer_of(region).items, ITEMSIZE[region.dtype]
            sizes = [items, *(axis.size for axis in region.axes), region.width // size]
            with torch.inference_mode(False):  # else it could not be written
                cells = self._slab.view(getattr(torch, region.dtype))
                self._views[role, layer] = cells.as_strided(sizes, strides, start)
        return self._views[role, layer]

    def item_bytes_view(self, buffer: Buffer) -> torch.Tensor:
        """A buffer's items as bytes, uint8 `[item, byte]`."""
        with torch.inference_mode(False):
            return self._slab.as_strided(
                [buffer.items, buffer.item_bytes], [buffer.item_stride, 1], buffer.base - self._base
            )

    def stacked(self, role: str) -> torch.Tensor:
        """All layers of a role as one typed tensor `[layer, item, entry, axes..., element]`. Raises
        ValueError unless the pool has the role and `placement="stack"`.
        """
        views = [self.view(role, r.layer) for r in self.layout.regions if r.role == role]
        step = views[0].shape[0] * views[0].stride(0) if views else 0
        starts = [view.storage_offset() for view in views]
        even = all(start == starts[0] + n * step for n, start in enumerate(starts))
        if not views or not even or self.placement != "stack":
            raise ValueError(
                f"{self.owner} {role}: {len(views)} layers, placement {self.placement!r}. The "
                "layers of a role are one tensor only with placement='stack'."
            )
        with torch.inference_mode(False):
            return views[0].as_strided([len(views), *views[0].shape], [step, *views[0].stride()])

    def write(self, layer: int, locations: ArrayLike, values: Mapping[str, torch.Tensor]) -> None:
        """Writes floats `[N, ...]` by role to flat locations `[N]`, in the pool's packing.

        Roles with scales are quantised. Other values may be widened, and are rounded only in a pool
        with a quantised packing. Raises ValueError where shape or dtype do not fit.

        Locations name no request: that no other request shares a page, and no room reads or writes
        it, is not checked. Those that `extend` returns are a request's own.
        """
        ids, rows = self._locations(values, layer, locations), []
        for role, cells in values.items():
            scales, quantised = self._scales(role, layer), cells.element_size() == 1
            if scales is not None and quantised and scale_role(role) not in values:
                raise ValueError(
                    f"{self.owner} layer {layer} {role}: {cells.dtype} without "
                    f"{scale_role(role)}. Give floats, or the scales too."
                )
            if scales is None or quantised or not cells.is_floating_point():
                scales, cells = None, self._widened(self._entries(role, layer), cells)
            rows.append(self._row(role, layer, len(ids), cells, scales))
        self.device.store_rows(rows, ids)

    def read(self, role: str, layer: int, locations: ArrayLike) -> torch.Tensor:
        """Reads flat locations `[N]` into a new tensor `[N, ...]`; roles with scales are
        dequantised to the pool's dtype.
        """
        (cells,) = self.read_roles((role,), layer, locations)
        return cells

    def read_roles(
        self, roles: Iterable[str], layer: int, locations: ArrayLike
    ) -> tuple[torch.Tensor, ...]:
        """`read` for several roles at once."""
        rows, needed = [], []
        for role in roles:
            needed.append(role)
            row, scales = torch_ops.ReadRow(self._entries(role, layer)), self._scales(role, layer)
            if scales is not None:
                needed.append(scale_role(role))
                row = row._replace(scales=scales, dtype=getattr(torch, self.dtype))
            rows.append(row)
        return tuple(self.device.load_rows(rows, self._locations(needed, layer, locations)))

    def scatter(self, layer: int, locations: ArrayLike, values: Mapping[str, torch.Tensor]) -> None:
        """Writes values `[N, ...]` as stored, by role, to flat locations `[N]`, all roles or none.

        Raises ValueError where shape or dtype differ from the pool's.
        """
        ids = self._locations(values, layer, locations)
        rows = [self._row(role, layer, len(ids), cells, None) for role, cells in values.items()]
        self.device.store_rows(rows, ids)

    def gather(self, role: str, layer: int, locations: ArrayLike) -> torch.Tensor:
        """Reads flat locations `[N]`, as stored, into a new tensor `[N, ...]`."""
        ids = self._locations((role,), layer, locations)
        (cells,) = self.device.load_rows([torch_ops.ReadRow(self._entries(role, layer))], ids)
        return cells

    @property
    def kv_buf_group_sizes(self) -> list[int]:
        """Buffers in each group of the contiguous listing: of K, of V; one for each layer that has
        the kind.
        """
        main = (spec for spec in self.specs if spec.state is None)
        return [*Counter(spec.name for spec in main for _ in spec.layers).values()]

    @property
    def kv_buf_groups(self) -> int:
        """Groups of equal size in the contiguous listing: K and V are two. Raises ValueError where
        their sizes differ, as group n would not begin at n times the length over the groups.
        """
        sizes = self.kv_buf_group_sizes
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{self.owner} kv_buf_groups: groups of different sizes, {sizes}. Read "
                "kv_buf_group_sizes."
            )
        return len(sizes)

    def get_contiguous_buf_infos(self) -> BufInfos:
        """The main cache's buffers, group by group: `pointer = data_ptr + page * item_len`."""
        return self._buf_infos([spec for spec in self.specs if spec.state is None])

    def get_state_buf_infos(self) -> list[StateBufInfos]:
        """State components other than the main cache; `[]` if there are none."""
        components = []
        for spec in self.specs:
            if spec.state is not None:
                sections, outer = sharded(replace(spec, layers=(0,)).regions(self.owner))
                count, steps = len(spec.layers), sum(section.size for section in sections)
                component = StateBufInfos(
                    state_type=spec.state,
                    **self._buf_infos([spec])._asdict(),
                    dim_per_tensor=[steps] * count,
                    sections=[sections] * count,
                    outer_counts=[outer] * count,
                )
                components.append(component)
        return components

    def _buf_infos(self, specs: Sequence[BufferSpec]) -> BufInfos:
        """The buffers of specifications; ValueError where pointers cannot say where they lie."""
        if specs and self.placement in ("page", "block"):
            raise ValueError(
                f"{self.owner}: with placement={self.placement!r} the layers of a page lie side by "
                "side; no pointer and item length per layer describe them. Read pool.layout, or "
                "build with placement='layer'."
            )
        layers = [(spec, layer) for spec in specs for layer in spec.layers]
        names = [spec.buffer_name(self.owner, layer) for spec, layer in layers]
        buffers = [self.layout.buffer_by_name[name] for name in names]
        return BufInfos(
            data_ptrs=[buffer.base for buffer in buffers],
            data_lens=[buffer.end - buffer.base for buffer in buffers],
            item_lens=[buffer.item_bytes for buffer in buffers],
            layer_ids=[layer for _, layer in layers],
        )

    def _region(self, role: str, layer: int) -> Region:
        region = self.layout.region_by_key.get((self.owner, layer, role))
        if region is None:
            roles = sorted({r.role for r in self.layout.regions if r.layer == layer})
            raise KeyError(
                f"{self.owner} layer {layer} {role}: not in this pool (the layer has {roles})."
                f"{nearest(role, roles)}"
            )
        return region

    def _cells_of(self, region: Region) -> tuple[int, list[int]]:
        """The first cell of a region, and strides of its items and axes, in cells of its dtype.
        Raises LayoutError where they are not aligned to it.
        """
        buffer, size = self.layout.buffer_of(region), ITEMSIZE[region.dtype]
        start = buffer.base - self._base + region.offset
        strides = [buffer.item_stride, *(axis.stride for axis in region.axes)]
        if start % size or any(stride % size for stride in strides):
            raise LayoutError(
                f"{region}: {region.dtype} at byte {region.offset} with strides {strides} is not "
                f"aligned to {size} bytes. Use other sizes, or a Skip before it."
            )
        return start // size, [*(stride // size for stride in strides), 1]

    def _row(
        self, role: str, layer: int, count: int, values: torch.Tensor, scales: torch.Tensor | None
    ) -> WriteRow:
        view = self._entries(role, layer)
        codes = view.dtype in quant.LARGEST_CODE
        if scales is not None and not (codes and scales.dtype in quant.SCALE_DTYPES):
            raise ValueError(
                f"{self.owner} layer {layer} {role}: cannot quantise to {view.dtype} with scales "
                f"of {scales.dtype}, only to float8_e4m3fn or int8 with scales of float32, "
                "float16 or float8_e8m0fnu. Give values and scales as stored."
            )
        shape = (count, *view.shape[2:])
        if tuple(values.shape) != shape or (scales is None and values.dtype != view.dtype):
            raise ValueError(
                f"{self.owner} layer {layer} {role}: values {tuple(values.shape)} "
                f"{values.dtype}, the pool takes {shape} {view.dtype}. Reshape or convert them "
                "first."
            )
        return torch_ops.WriteRow(view, values.detach(), scales)

    def _widened(self, view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Floats as the view's dtype, where that is exact or the pool may round."""
        floats = values.is_floating_point() and view.is_floating_point()
        if not floats or 1 in (values.element_size(), view.element_size()):
            return values
        wider = torch.promote_types(values.dtype, view.dtype) is view.dtype
        return values.to(view.dtype) if wider or self.packing in PACKINGS else values

    def _entries(self, role: str, layer: int) -> torch.Tensor:
        """`[item, entry, axes..., element]`; a slot is one entry."""
        view = self.view(role, layer)
        region = self.layout.region_by_key[self.owner, layer, role]
        return view if region.axis("entry") else view.unsqueeze(1)

    def _scales(self, role: str, layer: int) -> torch.Tensor | None:
        """The scales of a role as `_entries`; None if it has none."""
        scales = scale_role(role)
        known = (self.owner, layer, scales) in self.layout.region_by_key
        return self._entries(scales, layer) if known else None

    def _locations(self, roles: Iterable[str], layer: int, locations: ArrayLike) -> torch.Tensor:
        """Locations, checked for all of `roles`."""
        ends = {role: self._entries(role, layer).shape[:2].numel() for role in roles}
        if not ends:
            raise ValueError(f"{self.owner} layer {layer}: give one role or more.")
        role = min(ends, key=ends.__getitem__)
        return self._ids(f"layer {layer} {role}: location", locations, ends[role])

    def _ids(self, what: str, ids: ArrayLike, end: int) -> torch.Tensor:
        """Whole numbers `[N]` from 0 to `end` - 1, on the pool's device."""
        # copied: torch takes no array with negative strides
        flat = torch.as_tensor(ids.copy() if isinstance(ids, np.ndarray) else ids)
        whole = not flat.is_floating_point() and flat.dtype is not torch.bool
        if flat.dim() != 1 or (flat.numel() and not whole):
            raise ValueError(
                f"{self.owner} {what}s {list(flat.shape)} {flat.dtype}. Give a flat list of "
                "integers."
            )
        if flat.numel() and flat.device.type == "cpu":
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high >= end:
                wrong = low if low < 0 else high
                raise IndexError(f"{self.owner} {what} {wrong} of {end}.")
        return flat.to(self._slab.device, torch.int64)


def disjoint(src: ArrayLike, dst: ArrayLike) -> bool:
    """Whether the ids have none in common; False, for unknown, if they are on a device."""
    if any(isinstance(ids, torch.Tensor) and ids.device.type != "cpu" for ids in (src, dst)):
        return False
    return not np.isin(np.asarray(src), np.asarray(dst)).any()
