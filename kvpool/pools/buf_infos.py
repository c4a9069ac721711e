"""Pointer lists, as connectors of serving engines take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from kvpool.layout import PoolLayout
from kvpool.layout.formats import BufferSpec, StateType
from kvpool.layout.grid import StateSection, sharded


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


def buf_infos(layout: PoolLayout, owner: str, specs: Iterable[BufferSpec]) -> BufInfos:
    """The buffers of specifications, one after the other."""
    rows = [
        (layout.buffer_by_name[spec.buffer_name(owner, layer)], layer)
        for spec in specs
        for layer in spec.layers
    ]
    return BufInfos(
        data_ptrs=[buffer.base for buffer, _ in rows],
        data_lens=[buffer.end - buffer.base for buffer, _ in rows],
        item_lens=[buffer.item_bytes for buffer, _ in rows],
        layer_ids=[layer for _, layer in rows],
    )


def state_infos(
    layout: PoolLayout, owner: str, spec: BufferSpec, component: StateType
) -> StateBufInfos:
    """The buffers of a specification as a state component."""
    sections, outer = sharded(replace(spec, layers=(0,)).regions(owner))
    count, steps = len(spec.layers), sum(section.size for section in sections)
    return StateBufInfos(
        state_type=component,
        **buf_infos(layout, owner, [spec])._asdict(),
        dim_per_tensor=[steps] * count,
        sections=[sections] * count,
        outer_counts=[outer] * count,
    )
