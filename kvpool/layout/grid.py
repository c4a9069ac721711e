"""Strided grids as runs of bytes: arithmetic of validation and planning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.layout.types import Region

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Ints = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, Ints)
"""A number, or an array of several."""
Columns = TypeVar("Columns", bound="DataclassInstance")


class StateSection(NamedTuple):
    """Consecutive steps of the sharded dimension that ranks cut by themselves, such as the channels
    of q, k or v in a convolution: `size` here, from step `start` of the model's `total`.

    Equal `start` and `size` on two ranks: both hold the same steps. `size` of `total`: all do.
    """

    role: str
    start: int
    size: int
    total: int


def rows_of(columns: Columns, which: slice | Ints | npt.NDArray[np.bool_]) -> Columns:
    """Rows of a dataclass of arrays `[..., R]`: a slice, those of a mask, or at indices."""
    # binding takes rows of small arrays again and again, where dataclasses.replace takes most of it
    names = type(columns).__dataclass_fields__
    return type(columns)(**{name: getattr(columns, name)[..., which] for name in names})


def outer_sum(start: int, axes: Iterable[tuple[int, int]]) -> Ints:
    """Offsets of a grid of (size, stride) axes, `[product of sizes]`, the last axis innermost.

    `outer_sum(100, [(2, 64), (3, 8)])` is 100, 108, 116, 164, 172 and 180.
    """
    offsets = np.array([start], dtype=np.int64)
    for size, stride in axes:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return offsets


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For groups of `counts` elements: each element's group and its index in the group, `[sum]`.

    Of counts 2 and 3 the groups are 0, 0, 1, 1, 1, and the indices 0, 1, 0, 1, 2.
    """
    group: Ints = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    return group, np.arange(group.size, dtype=np.int64) - (np.cumsum(counts) - counts)[group]


def fuse(width: int, axes: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Fuses axes (size, stride) that continue `width`; returns it and the others, largest first.

    8 heads of 256 bytes, 256 bytes apart, in 16 entries 4,096 bytes apart: `fuse(256, [(16, 4096),
    (8, 256)])` is 2,048 bytes and [(16, 4096)]. Entries 2,048 bytes apart fuse too, into 32,768.
    """
    left: list[tuple[int, int]] = []
    for size, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride == width and not left:
            width *= size
        else:
            left.append((size, stride))
    return width, left[::-1]


def region_runs(region: Region) -> tuple[Ints, int]:
    """Offsets in the item `[R]` of a region's contiguous runs, and their width in bytes."""
    width, axes = fuse(region.width, ((axis.size, axis.stride) for axis in region.axes))
    return outer_sum(region.offset, axes), width


def run_count(region: Region) -> int:
    _, axes = fuse(region.width, ((axis.size, axis.stride) for axis in region.axes))
    return prod(size for size, _ in axes)


def sharded(regions: Sequence[Region]) -> tuple[list[StateSection], int]:
    """The sections of an item's `regions`, in the order of their bytes, and how many times it has
    them; a dim that follows the heads is counted in.
    """
    sections, times = [], 1
    for region in sorted(regions, key=lambda region: region.offset):
        head, dim = region.axis("head"), region.axis("dim")
        if head is None:
            continue
        steps = dim.size if dim else 1
        start, size, total = head.start * steps, head.size * steps, head.total * steps
        sections.append(StateSection(region.role, start, size, total))
        times = prod(a.size for a in region.axes if a is not head and a.stride >= head.stride)
    return sections, times


def bytes_below(starts: Ints, ends: Ints, offsets: Ints) -> Ints:
    """Bytes of sorted, disjoint half-open intervals that lie below each of `offsets`.

    Of intervals 0-50 and 100-120, below 60 lie 50 bytes, and below 110 lie 60.
    """
    if not starts.size:
        return np.zeros_like(offsets)
    before = np.concatenate([[0], np.cumsum(ends - starts)])
    last = np.searchsorted(starts, offsets, side="right") - 1
    inside = np.minimum(offsets, ends[last]) - starts[last]
    return np.where(last < 0, 0, before[last] + inside)


def merge_intervals(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Sorted union of half-open intervals; touching ones are merged: 0-64, 64-128 and 200-256 are
    0-128 and 200-256.
    """
    if starts.size < 2:
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.ones(len(starts), dtype=bool)
    first[1:] = starts[1:] > ends[:-1]
    last = np.append(first[1:], True)
    return starts[first], ends[last]
