"""Checks of how a pool describes its memory: views, layout and buffer lists for connectors."""

from __future__ import annotations

from dataclasses import replace

from kvpool.layout import Buffer
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal, fail, raises
from kvpool.testing.memory import PoolMemory, off, same
from kvpool.testing.trial import Trial


def a_new_pool_is_zero_and_aligned(case: Case) -> None:
    """Zeroed memory of the device's kind, each slab aligned as the device says."""
    pool = case.make()
    PoolMemory(pool).check()
    for buffer in pool.layout.buffers:
        kind = buffer.memory.partition(":")[0]
        equal(f"buffer {buffer.name}: memory", kind, case.device.memory_kind)
    for slab in pool.layout.slabs():
        step = case.device.alignment
        if slab.base % step:
            fail(f"slab at {slab.base:#x}: {slab.base % step} bytes past a multiple of {step}.")
    # those of a block pool lie over one another
    if pool.nbytes < sum(slab.nbytes for slab in pool.layout.slabs()):
        fail(f"nbytes: {pool.nbytes:,}, fewer than the bytes of its buffers.")


def two_pools_share_no_byte(case: Case) -> None:
    """A write to one pool does not change the other."""
    trials = Trial(case, 0), Trial(case, 1)
    for trial in trials:
        trial.check()


def views_described_back_are_the_layout(case: Case) -> None:
    """`describe` of every view gives the region that it came from."""
    case.make().check_integrity()


def views_show_the_bytes_of_the_layout(case: Case) -> None:
    """Every byte of every region is the same through its view and by the layout's formula."""
    trial = Trial(case)
    for region in trial.layout.regions:
        raw = off(case.device, trial.pool.view(region.role, region.layer))
        if region.axis("entry") is not None:
            raw = raw.reshape(-1, *raw.shape[2:])
        same(f"view of {region}", raw, trial.bytes[trial.cells(region)])


def contiguous_lists_agree_with_the_layout(case: Case) -> None:
    """Pointers, lengths, item lengths and layers; each buffer is listed once."""
    pool = case.make()
    if pool.placement in ("page", "block"):
        raises(ValueError, "lists of pages of all layers", pool.get_contiguous_buf_infos)
        return
    main, states = pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()
    listed = _listed(pool, "contiguous", *main)
    sizes, first = pool.kv_buf_group_sizes, 0
    equal("kv_buf_group_sizes, in all", sum(sizes), len(main.layer_ids))
    for size in sizes:
        layers = main.layer_ids[first : first + size]
        equal(f"layers of the group from buffer {first} on, ascending", layers, sorted({*layers}))
        first += size
    for number, state in enumerate(states):
        what = f"state {number} ({state.state_type.value})"
        listed += _listed(pool, what, *state[1:5])
        equal(f"{what}: sizes", len(state.dim_per_tensor), len(state.data_ptrs))
    equal("buffers listed", sorted(b.name for b in listed), sorted(pool.layout.buffer_by_name))


def layers_are_the_models(case: Case) -> None:
    """First, last and total layers agree with the layout."""
    pool = case.make()
    layers = {region.layer for region in pool.layout.regions}
    equal("start_layer", pool.start_layer, pool.layers[0])
    equal("end_layer", pool.end_layer, pool.layers[-1] + 1)
    equal("total_kv_layers of the layout", pool.layout.total_kv_layers, pool.total_kv_layers)
    equal("layers of regions that are not the pool's", layers - {*pool.layers}, set())
    equal("owners", {region.owner for region in pool.layout.regions}, {pool.owner})


def sizes_without_memory_are_the_same(case: Case) -> None:
    """A pool on the meta device has the same layout, without pointers."""
    layout, meta = case.make().layout, case.build(device="meta").layout
    equal("regions on meta", meta.regions, layout.regions)
    equal("spaces on meta", meta.spaces, layout.spaces)
    for sized, placed in zip(meta.buffers, layout.buffers):
        same = replace(sized, base=placed.base, memory=placed.memory)
        equal(f"buffer {sized.name} on meta", same, placed)


def _listed(
    pool: KVPool, what: str, ptrs: list[int], lens: list[int], items: list[int], layers: list[int]
) -> list[Buffer]:
    """The buffers of a list, each compared with the layout."""
    by_range = {(buffer.base, buffer.end): buffer for buffer in pool.layout.buffers}
    of_layer = {(region.buffer, region.layer) for region in pool.layout.regions}
    equal(f"{what}: lengths of its columns", {len(lens), len(items), len(layers)}, {len(ptrs)})
    buffers = []
    for ptr, length, item, layer in zip(ptrs, lens, items, layers):
        buffer = by_range.get((ptr, ptr + length))
        if buffer is None:
            words = f"the layout has no buffer of {length:,} bytes at {ptr:#x}."
            fail(f"{what}, layer {layer}: {words}")
        equal(f"{what}, layer {layer}: item length", item, buffer.item_bytes)
        if (buffer.name, layer) not in of_layer:
            words = f"is listed for layer {layer}, but has no such region."
            fail(f"{what}: buffer {buffer.name} {words}")
        buffers.append(buffer)
    return buffers
