"""What a device does to a pool's memory, in plain torch: right wherever torch can index, and what
other devices are compared with.

A device takes these functions for its own, and replaces those that it does faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpool import quant


class Row(NamedTuple):
    """What a write puts at its locations: `values` `[N, ...]` into `view` `[item, entry, ...]`.
    With `scales`, a view too, floats are quantised: block by block, as many as `scales` has
    elements.
    """

    view: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None


# dtypes that torch cannot index, as some of their size that it can
_INDEXABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, as a dtype that can be indexed on every device."""
    return tensor.view(_INDEXABLE[tensor.element_size()])


def store(view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See Device.store."""
    entries = view.shape[1]
    bits(view)[locations // entries, locations % entries] = bits(values)


def load(view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """See Device.load."""
    entries = view.shape[1]
    return bits(view)[locations // entries, locations % entries].view(view.dtype)


def quantize_store(
    view: torch.Tensor, scales: torch.Tensor, locations: torch.Tensor, values: torch.Tensor
) -> None:
    """See Device.quantize_store."""
    held, factors = quant.quantise(values, scales.shape[-1], scales.dtype)
    store(view, locations, held)
    store(scales, locations, factors)


def dequantize_load(
    view: torch.Tensor, scales: torch.Tensor, locations: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See Device.dequantize_load."""
    return quant.dequantise(load(view, locations), load(scales, locations), dtype)


def store_rows(rows: Sequence[Row], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    for view, values, scales in rows:
        if scales is None:
            store(view, locations, values)
        else:
            quantize_store(view, scales, locations, values)


def copy_items(
    views: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
) -> None:
    """See Device.copy_items."""
    for view in views:
        rows = _words(view)
        rows.index_copy_(0, dst, rows.index_select(0, src))


def _words(view: torch.Tensor) -> torch.Tensor:
    """The same bytes `[item, byte]` as words of eight, which are moved faster, where they are."""
    where = view.storage_offset(), view.stride(0), view.shape[1]
    return view if any(number % 8 for number in where) else view.view(torch.int64)
