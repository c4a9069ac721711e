"""Compares what two pools hold of one request, without a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvpool.layout import RequestAddress, Space
from kvpool.pools.base import KVPool


class ByteCount(NamedTuple):
    """Differing and compared bytes."""

    wrong: int
    checked: int


def locations(space: Space, address: RequestAddress, entries: range) -> np.ndarray:
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
    """Compares the live bytes of a request's positions from `start` on in two pools of one model,
    whose pages may differ; slots and rings are compared whole.
    """
    wrong = checked = 0
    for region in pool.layout.regions:
        values = []
        for owner, table in ((pool, address), (single, single_address)):
            space = owner.layout.space_of(owner.layout.region_by_key[region.key])
            alive = space.alive(address.num_tokens)
            first = 0 if space.per_request else start // space.tokens_per_entry
            rows = locations(space, table, range(max(first, alive.start), alive.stop))
            values.append(owner.gather(region.role, region.layer, rows))
        ours, truth = (rows.contiguous().view(torch.uint8) for rows in values)
        if ours.shape != truth.shape:
            raise ValueError(f"{region.key}: {tuple(ours.shape)} is no {tuple(truth.shape)}.")
        wrong, checked = wrong + int((ours != truth).sum()), checked + ours.numel()
    return ByteCount(wrong, checked)
