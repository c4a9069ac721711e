"""Rows of pools, written and read by what the formats' documents say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from disagg.plan import TransferPlan
from disagg.portable.conversion import Converter, WantedRows
from kvpool.device.host_copy import copy_runs
from kvpool.layout import RequestAddress
from kvpool.pools.base import KVPool
from tests import oracle
from tests.cast.formats import decode, encode

FLOATS = "float32", "float16", "bfloat16", "float8_e4m3fn"
SCALE = ".scale"


def names(pool: KVPool) -> list[tuple[str, int, str]]:
    """The keys of what has rows: floats, and values that have scales."""
    keys = pool.layout.region_by_key
    return [
        key
        for key, region in keys.items()
        if (region.dtype in FLOATS and not key[2].endswith(SCALE))
        or (*key[:2], key[2] + SCALE) in keys
    ]


def bytes_of(pool: KVPool, key: tuple[str, int, str]) -> np.ndarray:
    """A region's memory `[item, entry, axes..., element, byte]`."""
    view = pool.view(key[2], key[1])
    size = view.element_size()
    strides = [stride * size for stride in view.stride()] + [1]
    sizes = [*view.shape, size]
    start = view.data_ptr() - pool._slab.data_ptr()
    raw = torch.as_strided(pool._slab, sizes, strides, start)
    if pool.layout.region_by_key[key].axis("entry") is None:
        raw = raw[:, None]
    return raw.numpy()


def spots(pool: KVPool, key, address: RequestAddress, start: int = 0):
    """Which entries of a request are to be there, of positions from `start` on, and their items and
    steps.
    """
    space = pool.layout.space_of(pool.layout.region_by_key[key])
    total = address.num_tokens
    entries = np.arange(0, space.written(total) if space.has_entries else 1)
    alive = space.alive_in_request(total)
    entries = entries[(entries >= alive.start) & (entries < alive.stop)]
    if space.has_entries and space.grows:
        last = np.minimum((entries + 1) * space.tokens_per_entry, total) - 1
        entries = entries[last >= start]
    span = address.spans[space.id_list]
    if space.per_request:
        return entries, np.full(entries.shape, span.ids[0]), entries % space.steps
    items = span.ids[entries // space.entries_per_item - span.first_item]
    return entries, items, entries % space.steps


def shards(pool: KVPool, key) -> tuple[slice, ...]:
    """Which steps of its axes a rank holds."""
    axes = pool.layout.region_by_key[key].inner_axes
    return tuple(slice(axis.start, axis.stop) for axis in axes)


def write(pool: KVPool, key, address: RequestAddress, rows: np.ndarray, start: int = 0) -> None:
    """Stores rows `[entry, axes in the model..., D]` in the pool's format."""
    regions = pool.layout.region_by_key
    owner, layer, role = key
    region, scale = regions[key], regions.get((owner, layer, role + SCALE))
    count = 0 if scale is None else pool.view(role + SCALE, layer).shape[-1]
    entries, items, steps = spots(pool, key, address, start)
    held = rows[entries][(slice(None), *shards(pool, key))]
    values, scales = encode(held, region.dtype, scale.dtype if scale else "", count)
    bytes_of(pool, key)[items, steps] = values
    if scales is not None:
        bytes_of(pool, (owner, layer, role + SCALE))[items, steps] = scales


def read(pool: KVPool, key, address: RequestAddress) -> tuple[np.ndarray, np.ndarray]:
    """The entries of rows, and these as float32."""
    regions = pool.layout.region_by_key
    owner, layer, role = key
    region, scale = regions[key], regions.get((owner, layer, role + SCALE))
    entries, items, steps = spots(pool, key, address)
    values = bytes_of(pool, key)[items, steps]
    if scale is None:
        return entries, decode(values, region.dtype)
    scales = bytes_of(pool, (owner, layer, role + SCALE))[items, steps]
    return entries, decode(values, region.dtype, scales, scale.dtype)


def move(
    plan: TransferPlan,
    sources: Sequence[KVPool],
    tables: Sequence[RequestAddress],
    dest: KVPool,
    table: RequestAddress,
    chunks: Sequence[range],
    most: int,
) -> None:
    """Hands a request over in this process: bytes, and rows that are converted."""
    for tokens in chunks:
        for number, there in enumerate(tables):
            copy_runs(*plan.bind(number, there, table, tokens=tokens))
            if plan.cast is None:
                continue
            wanted = WantedRows(
                source=number, source_address=there, dest_address=table, tokens=tokens
            )
            for part in Converter(plan.cast, dest.layout).parts(wanted, most):
                buffer = np.zeros(most + 64, dtype=np.uint8)
                pointer = -(-buffer.ctypes.data // 64) * 64
                copy_runs(part.read.src, part.read.dst + pointer, part.read.nbytes)
                part.store(pointer)


def blank(pool: KVPool) -> None:
    oracle.blank(pool)
