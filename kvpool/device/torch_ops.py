"""The operations of a device in plain torch: correct wherever torch can index, and the reference
for other devices. A device uses them as its own until it has something faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch

from kvpool.device import quant

Views = Sequence[torch.Tensor]
"""Items as bytes, uint8 `[item, byte]` each."""


class WriteRow(NamedTuple):
    """One role of a write: `values` `[N, ...]` go to `view` `[item, entry, ...]`. With `scales`, a
    view too, floats are quantised: one block for each element of `scales`.
    """

    view: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None


class ReadRow(NamedTuple):
    """One role of a read: entries of `view` `[item, entry, ...]`, with `scales` as `dtype`."""

    view: torch.Tensor
    scales: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


# torch cannot index every dtype: bytes move as integers of the same size
_INDEXABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, which torch can index on every device."""
    return tensor.view(_INDEXABLE[tensor.element_size()])


def slots(view: torch.Tensor) -> torch.Tensor | None:
    """Entries `[item * entry, ...]` of a view, or None unless they are evenly spaced."""
    items, entries = view.shape[:2]
    if entries == 1:
        return view[:, 0]
    if items > 1 and view.stride(0) != entries * view.stride(1):
        return None
    return view.as_strided([items * entries, *view.shape[2:]], view.stride()[1:])


def write_entries(view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` `[N, ...]` of the view's dtype to flat locations `[N]`."""
    flat, entries = slots(view), view.shape[1]
    words, values = widest_words(view if flat is None else flat, values)
    if flat is None:
        words[locations // entries, locations % entries] = values
    else:
        words.index_copy_(0, locations, values)


def read_entries(view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """Reads flat locations `[N]` into a new tensor `[N, ...]`."""
    flat, entries = slots(view), view.shape[1]
    values = view.new_empty(locations.numel(), *view.shape[2:])
    words, out = widest_words(view if flat is None else flat, values)
    if flat is None:
        out.copy_(words[locations // entries, locations % entries])
    else:
        torch.index_select(words, 0, locations, out=out)
    return values


def store_rows(
    rows: Sequence[WriteRow],
    locations: torch.Tensor,
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = write_entries,
) -> None:
    """See Device.store_rows. `write` replaces `write_entries`."""
    for view, values, scales in rows:
        if scales is not None:
            values, factors = quant.quantise(values, scales.shape[-1], scales.dtype, view.dtype)
            write(scales, locations, factors)
        write(view, locations, values)


def load_rows(rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    tensors = []
    for view, scales, dtype in rows:
        values = read_entries(view, locations)
        if scales is not None:
            values = quant.dequantise(values, read_entries(scales, locations), dtype)
        tensors.append(values)
    return tensors


def copy_items(views: Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False) -> None:
    """See Device.copy_items."""
    for view in views:
        (rows,) = widest_words(view)
        rows.index_copy_(0, dst, rows.index_select(0, src))


def widest_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes as the widest integers of one dtype that fit: fewer elements move faster."""
    size = 8
    for tensor in tensors:
        itemsize, steps = tensor.element_size(), tensor.stride()
        if tensor.dim() < 2 or steps[-1] != 1:
            size = itemsize
            break
        numbers = tensor.shape[-1], tensor.storage_offset(), *steps[:-1]
        size = gcd(size, *(itemsize * number for number in numbers))
    return [tensor.view(_INDEXABLE[size]) for tensor in tensors]
