"""Rows at pointers. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class RowsAt(NamedTuple):
    """Rows `[item, entry, ..., element]` at pointer `base`: `sizes`, and `strides` in bytes."""

    dtype: str
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class ScaledRowsAt(NamedTuple):
    """Rows, and the scales of which each has some, `[item, entry, ..., scale]`."""

    rows: RowsAt
    scales: RowsAt | None = None
