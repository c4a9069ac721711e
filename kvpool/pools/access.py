"""Typed reads and writes of entries, by role and flat location."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kvpool.device import Device
from kvpool.device.quant import LARGEST_CODE, PACKINGS, SCALE_DTYPES, scale_role
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout import Buffer, LayoutError, PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE


class Entries:
    """What a pool's memory means, as tensors.

    A location is `item * entries_per_item + entry`, or the item where there are no entries (slots).
    """

    layout: PoolLayout
    device: Device
    owner: str
    dtype: str
    packing: str
    _slab: torch.Tensor
    _base: int
    _views: dict[tuple[str, int], torch.Tensor]

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

    def write(self, layer: int, locations: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Writes floats `[N, ...]` by role to flat locations `[N]`, packed as the pool packs them.

        Roles that have scales are quantised. Widening is exact; nothing else is rounded, unless the
        pool's packing is a quantised one. Raises ValueError where shape or dtype do not fit.
        """
        where, rows = self._locations(values, layer, locations), []
        for role, given in values.items():
            scales = scale_role(role)
            scaled = (self.owner, layer, scales) in self.layout.region_by_key
            if scaled and given.element_size() == 1 and scales not in values:
                raise ValueError(
                    f"{self.owner} layer {layer} {role}: {given.dtype} without {scales}, which "
                    "would be those of other values. Give floats, or the scales too."
                )
            view = self._entries(role, layer)
            if scaled and given.is_floating_point() and given.element_size() > 1:
                held = self._entries(scales, layer)
                rows.append(self._row(role, layer, where, given, held))
            else:
                rows.append(self._row(role, layer, where, self._widened(view, given)))
        self.device.store_rows(rows, where)

    def read(self, role: str, layer: int, locations: Any) -> torch.Tensor:
        """Reads flat locations `[N]` into a new tensor `[N, ...]`; what has scales becomes floats
        of the pool's dtype.
        """
        (found,) = self.read_roles((role,), layer, locations)
        return found

    def read_roles(
        self, roles: Iterable[str], layer: int, locations: Any
    ) -> tuple[torch.Tensor, ...]:
        """The same of several roles at once, each into a tensor of its own."""
        rows, needed = [], []
        for role in roles:
            needed.append(role)
            scales, held = scale_role(role), ReadRow(self._entries(role, layer))
            if (self.owner, layer, scales) in self.layout.region_by_key:
                needed.append(scales)
                dtype = getattr(torch, self.dtype)
                held = held._replace(scales=self._entries(scales, layer), dtype=dtype)
            rows.append(held)
        where = self._locations(needed, layer, locations)
        return tuple(self.device.load_rows(rows, where))

    def scatter(self, layer: int, locations: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Writes stored values `[N, ...]` by role to flat locations `[N]`, all roles or none.

        Raises ValueError where shape or dtype are not the pool's: nothing is broadcast or rounded.
        """
        where = self._locations(values, layer, locations)
        rows = [self._row(role, layer, where, given) for role, given in values.items()]
        self.device.store_rows(rows, where)

    def gather(self, role: str, layer: int, locations: Any) -> torch.Tensor:
        """Reads flat locations `[N]`, as stored, into a new tensor `[N, ...]`."""
        where = self._locations((role,), layer, locations)
        (found,) = self.device.load_rows([ReadRow(self._entries(role, layer))], where)
        return found

    def _row(
        self,
        role: str,
        layer: int,
        where: torch.Tensor,
        given: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> WriteRow:
        view = self._entries(role, layer)
        if scales is not None and (
            view.dtype not in LARGEST_CODE or scales.dtype not in SCALE_DTYPES
        ):
            raise ValueError(
                f"{self.owner} layer {layer} {role}: floats for {view.dtype} with scales of "
                f"{scales.dtype}. What is quantised here is float8_e4m3fn or int8, with scales of "
                "float32, float16 or float8_e8m0fnu: give values and scales as they are stored."
            )
        shape = (where.numel(), *view.shape[2:])
        if tuple(given.shape) != shape or (scales is None and given.dtype != view.dtype):
            raise ValueError(
                f"{self.owner} layer {layer} {role}: values {tuple(given.shape)} "
                f"{given.dtype}, the pool takes {shape} {view.dtype}. Reshape or convert them "
                "first."
            )
        return WriteRow(view, given.detach(), scales)

    def _widened(self, view: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Floats as the view's dtype, where that loses nothing or the pool may round."""
        both = given.is_floating_point() and view.is_floating_point()
        if not both or 1 in (given.element_size(), view.element_size()):
            return given
        wider = torch.promote_types(given.dtype, view.dtype) is view.dtype
        return given.to(view.dtype) if wider or self.packing in PACKINGS else given

    def _entries(self, role: str, layer: int) -> torch.Tensor:
        """`[item, entry, axes..., element]`; a slot is one entry."""
        view = self.view(role, layer)
        region = self.layout.region_by_key[self.owner, layer, role]
        return view if region.axis("entry") else view.unsqueeze(1)

    def _locations(self, roles: Iterable[str], layer: int, locations: Any) -> torch.Tensor:
        """Locations that all of `roles` have."""
        ends = {role: self._entries(role, layer).shape[:2].numel() for role in roles}
        if not ends:
            raise ValueError(f"{self.owner} layer {layer}: no role is named. Name one or more.")
        role = min(ends, key=ends.__getitem__)
        return self._ids(f"layer {layer} {role}: location", locations, ends[role])

    def _ids(self, what: str, given: Any, end: int) -> torch.Tensor:
        """Whole numbers `[N]` from 0 to `end` - 1, on the pool's device."""
        array = isinstance(given, np.ndarray)
        flat = torch.from_numpy(given.copy()) if array else torch.as_tensor(given)
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


def check_aligned(region: Region, buffer: Buffer, base: int) -> None:
    """Raises LayoutError where a cell of a region would not lie at a multiple of its element."""
    size = ITEMSIZE[region.dtype]
    start = buffer.base - base + region.offset
    strides = [buffer.item_stride, *(axis.stride for axis in region.axes)]
    if start % size or any(stride % size for stride in strides):
        raise LayoutError(
            f"{region}: {region.dtype} at byte {region.offset} with strides {strides} is not "
            f"aligned to {size} bytes. Use sizes that keep it so, or a Skip before it."
        )


def _view(slab: torch.Tensor, region: Region, buffer: Buffer, base: int) -> torch.Tensor:
    size = ITEMSIZE[region.dtype]
    steps = [
        (buffer.items, buffer.item_stride),
        *((a.size, a.stride) for a in region.axes),
        (region.width // size, size),
    ]
    start = buffer.base - base + region.offset
    return slab.view(getattr(torch, region.dtype)).as_strided(
        [count for count, _ in steps], [stride // size for _, stride in steps], start // size
    )
