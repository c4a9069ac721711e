"""Memory of a device as numpy arrays of bytes: what it holds, and what it must hold.

A check writes through a pool and into the array, and compares both. Device memory is read and
written through tensors, never by pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpool.device import Device
from kvpool.layout import Buffer, Region, RequestAddress, Space
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.formats import scale_role
from kvpool.layout.grid import Ints, merge_intervals
from kvpool.pools.base import KVPool
from kvpool.render.memory_map import where
from kvpool.testing.case import Case, equal, fail, random_of
from kvpool.testing.values import LARGEST_CODE, Bytes, decode

# gaps between buffers are checked too; of longer gaps, this many bytes after each buffer
GAP = 4096
SCALE_FORMATS = ("float32", "float16", "float8_e8m0fnu")
MAX_LOCATIONS = 23  # that a check writes in one call


class DeviceMemory:
    """Flat uint8 tensors as one array; `bytes` is what they must hold."""

    def __init__(self, device: Device, *tensors: torch.Tensor) -> None:
        self.device, self.tensors = device, tensors
        self.bytes: Bytes = np.zeros(sum(tensor.numel() for tensor in tensors), dtype=np.uint8)

    @classmethod
    def filled(cls, device: Device, random: np.random.Generator, nbytes: int) -> DeviceMemory:
        """New memory, filled at random."""
        memory = cls(device, device.allocate(nbytes))
        memory.fill(random)
        return memory

    def fill(self, random: np.random.Generator) -> None:
        """Sets every byte at random."""
        self.bytes = random.integers(0, 256, self.bytes.size, dtype=np.uint8)
        self.put(self.bytes)

    def put(self, array: Bytes) -> None:
        """Sets every byte of the memory."""
        settle(self.device)
        start = 0
        for tensor in self.tensors:
            tensor.copy_(torch.from_numpy(array[start : start + tensor.numel()].copy()))
            start += tensor.numel()

    def read(self) -> Bytes:
        """Every byte, after all queued work has ended."""
        settle(self.device)
        return np.concatenate([tensor.cpu().numpy() for tensor in self.tensors])

    def check(self, what: str) -> None:
        """Fails the check at the first byte that differs after `what`."""
        same(what, self.read(), self.bytes)


class PoolMemory(DeviceMemory):
    """A pool's buffers, their padding and the gaps between them; a new pool holds zeros."""

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.layout = pool, pool.layout
        storage = pool.item_bytes_view(pool.layout.buffers[0]).untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        bases, ends = np.array([(b.base, b.end + GAP) for b in pool.layout.buffers]).T
        self._lows, self._highs = merge_intervals(bases, ends)  # pointers, of each tensor
        self._highs[-1] -= GAP
        low, high = self._lows[0], self._highs[-1]
        if not start <= low < high <= end:
            fail(
                f"buffers of {pool.owner} from {low:#x} to {high:#x}, but the memory of their "
                f"views is from {start:#x} to {end:#x}."
            )
        sizes = self._highs - self._lows
        self._firsts = np.cumsum(sizes) - sizes  # index of each tensor's first byte
        parts = zip((self._lows - start).tolist(), sizes.tolist())
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        tensors = [
            empty.new_empty(0).set_(storage, offset, (size,), (1,)) for offset, size in parts
        ]
        super().__init__(pool.device, *tensors)

    def number(self, pointers: Ints) -> Ints:
        """Array indices of the bytes at these pointers; fails the check for a pointer outside."""
        part = np.searchsorted(self._lows, pointers, side="right") - 1
        outside = (part < 0) | (pointers >= self._highs[part])
        if outside.any():
            fail(f"pointer {int(pointers[outside][0]):#x} is outside the pool's memory.")
        numbers: Ints = pointers - self._lows[part] + self._firsts[part]
        return numbers

    def cells(self, region: Region, locations: Ints | None = None) -> Ints:
        """Array indices of a region's bytes at flat locations `[N]`, or at all:
        `[N, axes..., width]`, by the formula of kvpool.layout.
        """
        buffer, steps = self.layout.buffer_of(region), self.layout.space_of(region).steps
        if locations is None:
            locations = np.arange(buffer.items * steps)
        items, entries = np.divmod(locations, steps)
        entry = region.axis("entry")
        pointers = buffer.base + items * buffer.item_stride + region.offset
        pointers = pointers + entries * (entry.stride if entry else 0)
        for axis in region.inner_axes:
            pointers = pointers[..., None] + np.arange(axis.size) * axis.stride
        return self.number(pointers[..., None] + np.arange(region.width))

    def items(self, buffer: Buffer, ids: Ints) -> Ints:
        """Array indices of the bytes of whole items `[N]`: `[N, item_bytes]`."""
        pointers = buffer.base + np.asarray(ids, dtype=np.int64) * buffer.item_stride
        return self.number(pointers[:, None] + np.arange(buffer.item_bytes))

    def check(self, what: str = "", free: npt.NDArray[np.bool_] | None = None) -> None:
        """Fails the check at the first byte that differs, which it names; bytes in `free` may be
        anything. In quantised regions all NaNs are equal.
        """
        actual = self.read()
        if free is not None:
            actual[free] = self.bytes[free]
        if np.array_equal(actual, self.bytes):
            return
        for region in self.layout.regions:
            if region.dtype == "float8_e4m3fn" or region.role.endswith(".scale"):
                cells = self.cells(region)
                actual[cells] = nans_alike(actual[cells], self.bytes[cells], region.dtype)
        same(what, actual, self.bytes, self._name)

    def _name(self, number: int) -> str:
        part = np.searchsorted(self._firsts, number, side="right") - 1
        pointer = number + int(self._lows[part] - self._firsts[part])
        for buffer in self.layout.buffers:
            item, byte = divmod(pointer - buffer.base, buffer.item_stride)
            if 0 <= item < buffer.items and byte < buffer.item_bytes:
                place = where(self.layout, buffer.name, byte)
                if place is None:
                    return f"padding, byte {byte} of item {item} of buffer {buffer.name}"
                steps = str(place).removeprefix(f"{place.region.role}, ")
                return f"{place.region}: item {item}, {steps}"
        return f"pointer {pointer:#x}, between buffers"


class RegionGroup(NamedTuple):
    """Regions of one layer in one space, by role, and how many locations they have."""

    layer: int
    space: Space
    by_role: Mapping[str, Region]
    locations: int

    def pick(self, random: np.random.Generator) -> Ints:
        """Distinct locations `[N]`."""
        return random.permutation(self.locations)[:MAX_LOCATIONS].astype(np.int64)

    def inputs(self) -> Iterator[tuple[Region, Region | None]]:
        """Regions that a write takes values of, and those of their scales if it quantises them."""
        packed = {}
        for role, region in self.by_role.items():
            scales = self.by_role.get(scale_role(role))
            if scales and region.dtype in LARGEST_CODE and scales.dtype in SCALE_FORMATS:
                packed[role] = scales
        for role, region in self.by_role.items():
            if region not in packed.values():
                yield region, packed.get(role)


class Trial(PoolMemory):
    """The pool of a case, filled at random."""

    def __init__(self, case: Case, *seed: object) -> None:
        super().__init__(case.make())
        self.random = random_of(case.pool, *seed)
        self.fill(self.random)
        roles: dict[tuple[int, Space], dict[str, Region]] = {}
        for region in self.layout.regions:
            part = region.layer, self.layout.space_of(region)
            roles.setdefault(part, {})[region.role] = region
        self.groups = [
            RegionGroup(layer, space, by_role, space.steps * self.layout.items_by_space[space.name])
            for (layer, space), by_role in roles.items()
        ]

    def stored(self, region: Region, count: int) -> Bytes:
        """Random bytes of `count` entries."""
        return self.random.integers(0, 256, shape(region, count), dtype=np.uint8)

    def on_device(self, raw: Bytes, dtype: str) -> torch.Tensor:
        """Bytes as a tensor on the pool's device."""
        return on(self.tensors[0].device, raw, dtype)

    def scatter(self, group: RegionGroup, locations: Ints) -> dict[str, torch.Tensor]:
        """Writes random bytes to all regions of a group in one call; returns the values by role."""
        values = {}
        for role, region in group.by_role.items():
            raw = self.stored(region, locations.size)
            self.bytes[self.cells(region, locations)] = raw
            values[role] = self.on_device(raw, region.dtype)
        self.pool.scatter(group.layer, locations, values)
        return values

    def same(self, region: Region, read: torch.Tensor, expected: Bytes, how: str = "") -> None:
        """Fails the check unless a tensor that was read has these bytes."""
        same(f"{region}{how}: values that were read", off(self.device, read), expected)


def shape(region: Region, count: int) -> tuple[int, ...]:
    """`[N, axes..., byte]` of `count` entries."""
    return count, *(a.size for a in region.inner_axes), region.width


def blocks(scales: Region) -> int:
    """How many scales a cell has."""
    return scales.width // ITEMSIZE[scales.dtype]


def settle(device: Device) -> None:
    """Waits for all queued work."""
    device.record().synchronize()


def on(device: torch.device, raw: Bytes, dtype: str) -> torch.Tensor:
    """Bytes `[..., n * size]` as a tensor `[..., n]` of `dtype`."""
    sizes = *raw.shape[:-1], raw.shape[-1] // ITEMSIZE[dtype]
    tensor = torch.empty(sizes, dtype=getattr(torch, dtype))
    tensor.view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    return tensor.to(device)


def off(device: Device, tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, `[..., n * size]`."""
    settle(device)
    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def ids_on(device: torch.device, ids: Sequence[int] | Ints) -> torch.Tensor:
    """Ids as an int64 tensor `[N]` on a device."""
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


def nans_alike(actual: Bytes, expected: Bytes, dtype: str) -> Bytes:
    """`actual`, with the expected NaN where both have one."""
    nan = np.isnan(decode(actual, dtype)) & np.isnan(decode(expected, dtype))
    return np.where(np.repeat(nan, ITEMSIZE[dtype], axis=-1), expected, actual)


def same(
    what: str, actual: Bytes, expected: Bytes, name: Callable[[int], str] = "byte {}".format
) -> None:
    """Fails the check at the first byte that differs after `what`, with its name by flat index."""
    equal(f"{what}: shape", actual.shape, expected.shape)
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        first = int(wrong[0])
        place = f"{what}: {name(first)}" if what else name(first)
        fail(
            f"{place}: {actual.flat[first]:#04x} found, {expected.flat[first]:#04x} expected "
            f"({wrong.size:,} bytes of {actual.size:,} differ)."
        )


class ByteCount(NamedTuple):
    """Differing and compared bytes."""

    wrong: int
    checked: int


def flat_locations(space: Space, address: RequestAddress, entries: range) -> Ints:
    """Flat locations of a request's entries in a pool."""
    span = address.spans[space.id_list]
    items, steps = space.place(np.arange(entries.start, entries.stop, dtype=np.int64))
    return np.asarray(span.ids[items - span.first_item] * space.steps + steps)


def same_as_pool(
    pool: KVPool,
    address: RequestAddress,
    single: KVPool,
    single_address: RequestAddress,
    start: int = 0,
) -> ByteCount:
    """Compares, without a plan, the live bytes of a request's positions from `start` on in two
    pools of one model, whose pages may differ; slots and rings are compared whole.
    """
    wrong = checked = 0
    for region in pool.layout.regions:
        values = []
        for owner, table in ((pool, address), (single, single_address)):
            space = owner.layout.space_of(owner.layout.region_by_key[region.key])
            alive = space.alive(address.num_tokens)
            first = 0 if space.per_request else start // space.tokens_per_entry
            rows = flat_locations(space, table, range(max(first, alive.start), alive.stop))
            values.append(owner.gather(region.role, region.layer, rows))
        ours, truth = (rows.contiguous().view(torch.uint8) for rows in values)
        if ours.shape != truth.shape:
            raise ValueError(f"{region.key}: {tuple(ours.shape)} is no {tuple(truth.shape)}.")
        wrong, checked = wrong + int((ours != truth).sum()), checked + ours.numel()
    return ByteCount(wrong, checked)
