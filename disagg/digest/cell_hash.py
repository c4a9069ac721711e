"""Hashes of cells, and what reads them from memory. A cell is at most `CELL` consecutive bytes of
one grid point of one entry.

A cell's hash depends on its region's key, its entry, its number in the whole model, and its bytes.
It detects accidents, not forgery: collisions are easy to construct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.plan.runs import Box
from kvpool.layout import Axis, Buffer, Key
from kvpool.layout.grid import Ints

Hashes = npt.NDArray[np.uint64]
ReadCells = Callable[[Buffer, Ints, int], npt.NDArray[np.void]]
"""Reads that many bytes at each offset `[E, C]` of a buffer, `[E, C]`."""

CELL = 4096
MIN_CELL_COST = 64
"""A smaller cell costs as much as one of this many bytes."""
SLICE_BYTES = 256 << 10


class Cells(NamedTuple):
    """Cells of an entry, `[C]`, `width` bytes each: offsets in it, and weighted numbers."""

    offsets: Ints
    numbers: Hashes
    width: int

    @property
    def work(self) -> int:
        """Cost of hashing them, in bytes."""
        return self.numbers.size * max(self.width, MIN_CELL_COST)

    def slices(self, entries: int) -> Iterator[tuple[slice, Cells]]:
        """Slices of `entries` entries and of their cells that fit a CPU cache."""
        many = SLICE_BYTES // max(self.width, MIN_CELL_COST)
        count = max(1, many // self.numbers.size)
        for first in range(0, self.numbers.size, many):
            part = slice(first, first + many)
            cells = Cells(self.offsets[part], self.numbers[part], self.width)
            for start in range(0, entries, count):
                yield slice(start, min(start + count, entries)), cells


@lru_cache(maxsize=32)
def cells_of(axes: tuple[Axis, ...], width: int, box: Box) -> tuple[Cells, ...]:
    """The cells of steps `box` of inner axes: full ones, and the rest of each grid point. A grid
    point of 9,000 bytes is two cells of 4,096 and one of 808.
    """
    offsets, numbers = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint64)
    for axis, (_, low, high) in zip(axes, box):
        steps = np.arange(low, high, dtype=np.int64)
        offsets = (offsets[:, None] + (steps - axis.start) * axis.stride).ravel()
        numbers = (numbers[:, None] * np.uint64(axis.total) + steps.astype(np.uint64)).ravel()
    whole, rest = divmod(width, CELL)
    numbers *= np.uint64(whole + bool(rest))
    cells = []
    for parts, size in ((range(whole), CELL), (range(whole, whole + bool(rest)), rest)):
        if parts:
            part = np.arange(parts.start, parts.stop, dtype=np.int64)
            many = (numbers[:, None] + part.astype(np.uint64)).ravel()
            cells.append(Cells((offsets[:, None] + part * CELL).ravel(), many * _NUMBER, size))
    return tuple(cells)


def sums(rows: npt.NDArray[np.void], cells: Cells, key: Key, entries: Ints) -> Hashes:
    """Sums mod 2**64 of the cell hashes of `entries`, whose cells are `rows`, `[E, C]`."""
    hashes = _multilinear(rows)
    hashes += cells.numbers
    hashes += (entries.astype(np.uint64) * _ENTRY + _seed(key))[:, None]
    return np.asarray(_mix(hashes).sum(axis=1), dtype=np.uint64)


def read_memory(buffer: Buffer, offsets: Ints, width: int) -> npt.NDArray[np.void]:
    """Reads cells of a buffer, see `ReadCells`. Raises ValueError without its device."""
    if not buffer.on_host:
        return _read_device(buffer, offsets, width)
    memory: Any = (ctypes.c_ubyte * (buffer.end - buffer.base)).from_address(buffer.base)
    rows: Any = np.ndarray((len(memory) - width + 1,), f"V{width}", memory, strides=(1,))
    return np.asarray(rows[offsets])


def _read_device(buffer: Buffer, offsets: Ints, width: int) -> npt.NDArray[np.void]:
    from kvpool.device import DeviceUnavailable, get_device  # imports torch

    lengths = np.full(offsets.size, width, dtype=np.int64)
    try:
        device = get_device(buffer.memory)
        stage = device.allocate(offsets.size * width)
        packed = stage.data_ptr() + np.arange(offsets.size, dtype=np.int64) * width
        device.copy_runs(buffer.base + offsets.ravel(), packed, lengths)
        device.record().synchronize()
    except DeviceUnavailable as reason:
        raise ValueError(f"buffer {buffer.name} on {buffer.memory}: {reason}") from None
    return stage.cpu().numpy().view(f"V{width}").reshape(offsets.shape)


@lru_cache(maxsize=4096)
def _seed(key: Key) -> Hashes:
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8")


def _multilinear(cells: npt.NDArray[np.void]) -> Hashes:
    """Sum of the 32-bit halves of a cell's words times odd weights: each half changes the sum."""
    width = cells.dtype.itemsize
    words = -(-width // 8)
    raw = cells.view(np.uint8).reshape(*cells.shape, width)
    if width % 8:
        raw = np.concatenate([raw, np.zeros((*cells.shape, -width % 8), np.uint8)], axis=2)
    values = raw.view("<u8")
    hashes = np.einsum("ijk,k->ij", values, _LOW[:words])
    values >>= np.uint64(32)  # in place: allocation costs more than arithmetic
    hashes += np.einsum("ijk,k->ij", values, _HIGH[:words])
    return np.asarray(hashes, dtype=np.uint64)


def _mix(x: Hashes) -> Hashes:
    """The finaliser of splitmix64, in place: a bijection that mixes all bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


_ODD = _mix(np.arange(1, 3 + CELL // 4, dtype=np.uint64)) | np.uint64(1)
_LOW, _HIGH = _ODD[: CELL // 8], _ODD[CELL // 8 : -2]
_NUMBER, _ENTRY = _ODD[-2:]
