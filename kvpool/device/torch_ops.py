"""What a device does to a pool's memory, in plain torch: right wherever torch can index, and what
other devices are compared with.

A device takes these functions for its own, and replaces those that it does faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch

from kvpool.device import quant


class Row(NamedTuple):
    """What a write puts at its locations: `values` `[N, ...]` into `view` `[item, entry, ...]`.
    With `scales`, a view too, floats are quantised: block by block, as many as `scales` has
    elements.
    """

    view: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None


class Held(NamedTuple):
    """What a read takes from its locations: entries of `view` `[item, entry, ...]` as they are, or
    with `scales`, a view too, the floats of `dtype` that both stand for.
    """

    view: torch.Tensor
    scales: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


# dtypes that torch cannot index, as some of their size that it can
_INDEXABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, as a dtype that can be indexed on every device."""
    return tensor.view(_INDEXABLE[tensor.element_size()])


def slots(view: torch.Tensor) -> torch.Tensor | None:
    """Entries `[item * entry, ...]` of a view, where they lie at one distance from each other."""
    items, entries = view.shape[:2]
    if entries == 1:
        return view[:, 0]
    if items > 1 and view.stride(0) != entries * view.stride(1):
        return None
    return view.as_strided([items * entries, *view.shape[2:]], view.stride()[1:])


def store(view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See Device.store."""
    flat, entries = slots(view), view.shape[1]
    if flat is None:
        held, given = words(view, values)
        held[locations // entries, locations % entries] = given
    else:
        held, given = words(flat, values)
        held.index_copy_(0, locations, given)


def load(view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """See Device.load."""
    flat, entries = slots(view), view.shape[1]
    found = view.new_empty(locations.numel(), *view.shape[2:])
    if flat is None:
        held, out = words(view, found)
        out.copy_(held[locations // entries, locations % entries])
    else:
        held, out = words(flat, found)
        torch.index_select(held, 0, locations, out=out)
    return found


def quantize_store(
    view: torch.Tensor, scales: torch.Tensor, locations: torch.Tensor, values: torch.Tensor
) -> None:
    """See Device.quantize_store."""
    held, factors = quant.quantise(values, scales.shape[-1], scales.dtype, view.dtype)
    store(view, locations, held)
    store(scales, locations, factors)


def store_rows(rows: Sequence[Row], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    for view, values, scales in rows:
        if scales is None:
            store(view, locations, values)
        else:
            quantize_store(view, scales, locations, values)


def load_rows(rows: Sequence[Held], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    found = []
    for view, scales, dtype in rows:
        values = load(view, locations)
        if scales is not None:
            values = quant.dequantise(values, load(scales, locations), dtype)
        found.append(values)
    return found


def copy_items(
    views: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
) -> None:
    """See Device.copy_items."""
    for view in views:
        (rows,) = words(view)
        rows.index_copy_(0, dst, rows.index_select(0, src))


def words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes as the widest words, one dtype for all, that their last axes and strides
    allow: fewer are moved faster.
    """
    size = 8
    for tensor in tensors:
        each, steps = tensor.element_size(), tensor.stride()
        if tensor.dim() < 2 or steps[-1] != 1:
            size = each
            break
        numbers = tensor.shape[-1], tensor.storage_offset(), *steps[:-1]
        size = gcd(size, *(each * number for number in numbers))
    return [tensor.view(_INDEXABLE[size]) for tensor in tensors]
