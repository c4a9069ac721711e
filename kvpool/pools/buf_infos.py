"""Pointer lists, as connectors of serving engines take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvpool.layout.formats import BufferSpec, StateType
from kvpool.layout.grid import StateSection, sharded
from kvpool.pools.access import TypedAccess


class BufInfos(NamedTuple):
    """Pointers, lengths and item lengths in bytes, and global layer ids, of each buffer."""

    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]


class StateBufInfos(NamedTuple):
    """One state component, as BufInfos, and how each of its buffers is sharded.

    `dim_per_tensor`: steps of the sharded dimension here, heads or channels; 0 without one.
    `sections`: what they consist of, in order. `outer_counts`: how many times an item repeats them
    (taps before channels, entries before heads).
    """

    state_type: StateType
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]
    dim_per_tensor: list[int]
    sections: list[list[StateSection]]
    outer_counts: list[int]


def buf_infos(pool: TypedAccess, specs: Sequence[BufferSpec]) -> BufInfos:
    """The buffers of specifications, one after the other. Raises ValueError where pointers and item
    lengths cannot say where they lie.
    """
    if specs and pool.placement in ("page", "block"):
        raise ValueError(
            f"{pool.owner}: with placement={pool.placement!r} the layers of a page lie side by "
            "side; no pointer and item length per layer describe them. Read pool.layout, or "
            "build with placement='layer'."
        )
    rows = [
        (pool.layout.buffer_by_name[spec.buffer_name(pool.owner, layer)], layer)
        for spec in specs
        for layer in spec.layers
    ]
    return BufInfos(
        data_ptrs=[buffer.base for buffer, _ in rows],
        data_lens=[buffer.end - buffer.base for buffer, _ in rows],
        item_lens=[buffer.item_bytes for buffer, _ in rows],
        layer_ids=[layer for _, layer in rows],
    )


def state_infos(pool: TypedAccess, spec: BufferSpec, component: StateType) -> StateBufInfos:
    """The buffers of a specification as a state component."""
    sections, outer = sharded(replace(spec, layers=(0,)).regions(pool.owner))
    count, steps = len(spec.layers), sum(section.size for section in sections)
    return StateBufInfos(
        state_type=component,
        **buf_infos(pool, [spec])._asdict(),
        dim_per_tensor=[steps] * count,
        sections=[sections] * count,
        outer_counts=[outer] * count,
    )
