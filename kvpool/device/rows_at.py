"""Rows at pointers. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.types import Buffer, Region


class RowsAt(NamedTuple):
    """Rows `[item, entry, ..., element]` at pointer `base`: `sizes`, and `strides` in bytes."""

    dtype: str
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class ScaledRowsAt(NamedTuple):
    """Rows, and the scales of each, `[item, entry, ..., scale]`."""

    rows: RowsAt
    scales: RowsAt | None = None


def rows_at(
    region: Region, buffer: Buffer, steps: Mapping[str, range] | None = None, along: str = ""
) -> RowsAt:
    """Rows of a region in a buffer: of `steps` of its axes (None: of all), their elements along
    axis `along`, or in its cells.
    """
    size, entry, elements = ITEMSIZE[region.dtype], region.axis("entry"), region.axis(along)
    inner = [part for part in region.inner_axes if part.name != along]
    first, sizes = region.offset, [part.size for part in inner]
    if steps is not None:
        first += sum((steps[part.name].start - part.start) * part.stride for part in inner)
        sizes = [len(steps[part.name]) for part in inner]
    return RowsAt(
        dtype=region.dtype,
        base=buffer.base + first,
        sizes=(
            buffer.items,
            entry.size if entry else 1,
            *sizes,
            elements.size if elements else region.width // size,
        ),
        strides=(
            buffer.item_stride,
            entry.stride if entry else buffer.item_stride,
            *(part.stride for part in inner),
            elements.stride if elements else size,
        ),
    )
