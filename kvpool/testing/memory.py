"""All bytes of a pool as a numpy array, and the index of each value by the layout's formula.

Device memory is read and written through tensors, never by pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.device import Device
from kvpool.layout import Buffer, Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.render.memory_map import where
from kvpool.testing.case import fail
from kvpool.testing.values import Bytes, decode

GAP = 4096
"""Gaps between buffers are checked too; of longer gaps, this many bytes after each buffer."""


class PoolMemory:
    """A pool's buffers, their padding and the gaps between them, as one array."""

    def __init__(self, pool: KVPool) -> None:
        self.layout, self._device = pool.layout, pool.device
        # [first pointer, end pointer, bytes on the device, index of the first byte in the array]
        self._parts: list[tuple[int, int, torch.Tensor, int]] = []
        storages: dict[int, tuple[torch.UntypedStorage, list[Buffer]]] = {}
        for buffer in pool.layout.buffers:
            storage = pool.item_bytes_view(buffer).untyped_storage()
            storages.setdefault(storage.data_ptr(), (storage, []))[1].append(buffer)
        self.nbytes = 0
        for start, (storage, buffers) in storages.items():
            for low, high in _stretches(buffers):
                if not start <= low < high <= start + storage.nbytes():
                    fail(
                        f"buffers of {pool.owner} from {low:#x} to {high:#x}, but the memory of "
                        f"their views is from {start:#x} to {start + storage.nbytes():#x}."
                    )
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
                flat.set_(storage, low - start, (high - low,), (1,))
                self._parts.append((low, high, flat, self.nbytes))
                self.nbytes += high - low

    def read(self) -> Bytes:
        """Every byte, after all queued work has ended."""
        settle(self._device)
        return np.concatenate([flat.cpu().numpy() for _, _, flat, _ in self._parts])

    def put(self, array: Bytes) -> None:
        """Sets every byte."""
        settle(self._device)
        for low, high, flat, start in self._parts:
            flat.copy_(torch.from_numpy(array[start : start + high - low].copy()))

    def fill(self, random: np.random.Generator) -> Bytes:
        """Sets every byte at random and returns the array."""
        array = random.integers(0, 256, self.nbytes, dtype=np.uint8)
        self.put(array)
        return array

    def number(self, pointers: Ints) -> Ints:
        """Array indices of the bytes at these pointers; fails the check for a pointer outside."""
        low, high = pointers.min(initial=1 << 62), pointers.max(initial=0)
        numbers = np.full(pointers.shape, -1, dtype=np.int64)
        for first, after, _, start in self._parts:
            if first <= low and high < after:  # all in one part: no masks
                return pointers - first + start
            inside = (pointers >= first) & (pointers < after)
            numbers[inside] = pointers[inside] - first + start
        if (numbers < 0).any():
            fail(f"pointer {int(pointers[numbers < 0][0]):#x} is outside the pool's memory.")
        return numbers

    def cells(self, region: Region, items: Ints, entries: Ints | int = 0) -> Ints:
        """Array indices of a region's bytes at items `[N]` and entries `[N]`:
        `[N, axes..., width]`, by the formula of kvpool.layout.
        """
        buffer = self.layout.buffer_of(region)
        pointers = (
            buffer.base + np.asarray(items, dtype=np.int64) * buffer.item_stride + region.offset
        )
        for axis in region.axes:
            if axis.name == "entry":
                pointers = (
                    pointers
                    + np.asarray(entries).reshape(-1, *[1] * (pointers.ndim - 1)) * axis.stride
                )
            else:
                pointers = pointers[..., None] + np.arange(axis.size) * axis.stride
        return self.number(pointers[..., None] + np.arange(region.width))

    def items(self, buffer: Buffer, ids: Ints) -> Ints:
        """Array indices of the bytes of whole items `[N]`: `[N, item_bytes]`."""
        pointers = buffer.base + np.asarray(ids, dtype=np.int64) * buffer.item_stride
        return self.number(pointers[:, None] + np.arange(buffer.item_bytes))

    def check(self, expected: Bytes, free: npt.NDArray[np.bool_] | None = None) -> None:
        """Fails the check at the first byte that differs; bytes in `free` may be anything. In
        quantised regions all NaNs are equal.
        """
        actual = self.read()
        wrong = actual != expected
        if free is not None:
            wrong &= ~free
        if wrong.any():
            wrong &= ~self._nans(actual, expected)
        if not wrong.any():
            return
        first = int(np.flatnonzero(wrong)[0])
        fail(
            f"{self._name(first)}: {int(actual[first]):#04x} found, {int(expected[first]):#04x} "
            f"expected ({int(wrong.sum()):,} bytes of {self.nbytes:,} differ)."
        )

    def _nans(self, actual: Bytes, expected: Bytes) -> npt.NDArray[np.bool_]:
        alike = np.zeros(self.nbytes, dtype=bool)
        for region in self.layout.regions:
            if region.dtype != "float8_e4m3fn" and not region.role.endswith(".scale"):
                continue
            items = self.layout.buffer_of(region).items
            cells = self.cells(region, *every(items, self.layout.space_of(region).steps))
            in_actual, in_expected = (
                np.isnan(decode(a[cells], region.dtype)) for a in (actual, expected)
            )
            alike[cells] = np.repeat(in_actual & in_expected, ITEMSIZE[region.dtype], axis=-1)
        return alike

    def _name(self, number: int) -> str:
        low, _, _, start = next(p for p in self._parts if p[3] <= number < p[3] + p[1] - p[0])
        pointer = low + number - start
        for buffer in self.layout.buffers:
            item, byte = divmod(pointer - buffer.base, buffer.item_stride)
            if 0 <= item < buffer.items and byte < buffer.item_bytes:
                place = where(self.layout, buffer.name, byte)
                if place is None:
                    return f"padding, byte {byte} of item {item} of buffer {buffer.name}"
                steps = str(place).removeprefix(f"{place.region.role}, ")
                return f"{place.region}: item {item}, {steps}"
        return f"pointer {pointer:#x}, between buffers"


def _stretches(buffers: Sequence[Buffer]) -> Iterator[tuple[int, int]]:
    """Start and end pointers of stretches of buffers without long gaps."""
    ordered = sorted(buffers, key=lambda buffer: buffer.base)
    low, high = ordered[0].base, ordered[0].end
    for buffer in ordered[1:]:
        if buffer.base > high + GAP:
            yield low, high + GAP
            low = buffer.base
        high = max(high, buffer.end)
    yield low, high


def every(items: int, entries: int) -> tuple[Ints, Ints]:
    """Items `[N]` and entries `[N]` of all locations."""
    item, entry = np.divmod(np.arange(items * entries, dtype=np.int64), entries)
    return item, entry


def settle(device: Device) -> None:
    """Waits for all queued work."""
    device.record().synchronize()


def on(device: torch.device, raw: Bytes, dtype: str) -> torch.Tensor:
    """Bytes `[..., n * size]` as a tensor `[..., n]` of `dtype`."""
    tensor = torch.empty(
        *raw.shape[:-1], raw.shape[-1] // ITEMSIZE[dtype], dtype=getattr(torch, dtype)
    )
    tensor.view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    return tensor.to(device)


def off(device: Device, tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, `[..., n * size]`."""
    settle(device)
    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def ids_on(device: torch.device, ids: Sequence[int] | Ints) -> torch.Tensor:
    """Ids as an int64 tensor `[N]` on a device."""
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


def random_slab(
    device: Device, random: np.random.Generator, nbytes: int
) -> tuple[Bytes, torch.Tensor]:
    """Random bytes, and device memory filled with them."""
    raw = random.integers(0, 256, nbytes, dtype=np.uint8)
    slab = device.allocate(nbytes)
    slab.copy_(torch.from_numpy(raw))
    return raw, slab


def same_slab(device: Device, slab: torch.Tensor, expected: Bytes, what: str) -> None:
    """Fails the check at the first byte that differs after `what`."""
    actual = off(device, slab)
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        first = int(wrong[0])
        fail(
            f"{what}: byte {first} is {actual[first]:#04x}, expected {expected[first]:#04x} "
            f"({wrong.size:,} of {actual.size:,} bytes differ)."
        )
