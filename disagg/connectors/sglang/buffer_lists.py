"""The fields of SGLang's own `KVArgs`, from a layout: for those who keep SGLang's own transports.

SGLang pairs buffers by their places in lists: `k0..kL, v0..vL`, or a row a layer; a draft's after
the target's; the components of other state in lists of lists. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpool.layout import Buffer, LayoutError, PoolLayout, Region
from kvpool.layout.grid import sharded

MAIN: tuple[str, ...] = ("k", "v", "latent", "rope", "c4.latent", "c4.index_key", "c128.latent")
"""First roles of the buffers of pages, in SGLang's order."""
STATES = {
    "swa": ("swa.k", "swa.v", "swa.latent", "c4.state", "c4.index_state"),
    "block_scale": ("k.scale", "v.scale"),
    "block_scale_swa": ("swa.k.scale", "swa.v.scale"),
    "c128_state": ("c128.state",),
    "mamba": ("conv.q", "conv.x", "temporal"),
    "dsa": ("index_key",),
}
"""Components of other state, in SGLang's order, and the first roles of their buffers."""
LISTS = (
    *("data_ptrs", "data_lens", "item_lens", "layer_ids"),
    *("dim_per_tensor", "slice_outer_counts", "conv_shard_groups"),
)
"""What SGLang lists of a buffer: the first three always, all of a buffer of linear attention."""

BufferRegions = tuple[Buffer, list[Region]]
ListRow = tuple[Any, ...]
"""Of a buffer, the values of the first few of `LISTS`."""


def kv_args(layout: PoolLayout) -> dict[str, Any]:
    """The fields of `KVArgs` that say what a rank's pools are, by name; `state_types` by value.

    Raises LayoutError, which names the buffer, where its items are not one after the other: SGLang
    takes a page's address for pointer + id * item length.
    """
    regions_by_buffer: dict[str, list[Region]] = {}
    for region in sorted(layout.regions, key=lambda region: region.offset):
        if layout.buffer_by_name[region.buffer].space == "kv":  # windows whose pages are all kept
            region = replace(region, role=region.role.removeprefix("swa."))
        regions_by_buffer.setdefault(region.buffer, []).append(region)
    buffers = [(layout.buffer_by_name[name], rs) for name, rs in regions_by_buffer.items()]
    linear = any(space.kind == "slot" for space in layout.spaces)
    main, components = MAIN, STATES
    # rope in tensors of its own: index keys are too, as on an NPU
    if any(regions[0].role == "rope" for _, regions in buffers):
        main = (*MAIN, "index_key", "index_key.scale")
        components = {kind: roles for kind, roles in STATES.items() if kind != "dsa"}
    drafts, pages = 0, list[ListRow]()
    states: dict[tuple[str, str], list[ListRow]] = {}
    for owner, first in (("target", 0), ("draft", layout.total_kv_layers)):
        own = [(buffer, regions) for buffer, regions in buffers if regions[0].owner == owner]
        paged = ordered(own, main)
        drafts = len(paged)
        for buffer, regions in paged:  # layers are named beside linear attention only
            layer = (first + regions[0].layer,) if linear else ()
            pages.append(row(layout, buffer) + layer)
        for kind, roles in components.items():
            name = kind, owner if kind == "swa" else ""  # SGLang has a draft's window apart
            for buffer, regions in ordered(own, roles):
                more = sliced(regions) if kind == "mamba" else ()
                states.setdefault(name, []).append(row(layout, buffer) + more)
    target = [region for region in layout.regions if region.owner == "target"]
    layers = [region.layer for region in target]
    heads = [axis for axis in (region.axis("head") for region in target) if axis is not None]
    return {
        "page_size": layout.space_by_name["kv"].tokens_per_item,
        "num_draft_entries": drafts,
        "prefill_start_layer": min(layers),
        "prefill_end_layer": max(layers) + 1,
        "kv_head_num": heads[0].size if heads else 0,
        "total_kv_head_num": heads[0].total if heads else 0,
        "state_types": [kind for kind, _ in states],
        **{f"kv_{name}": column(pages, n) for n, name in enumerate(LISTS[:4])},
        **{
            f"state_{name}": [column(rows, n) for rows in states.values()]
            for n, name in enumerate(LISTS)
        },
    }


def ordered(buffers: list[BufferRegions], roles: Sequence[str]) -> list[BufferRegions]:
    """Buffers by their first role, in the order of `roles`, then by layer."""
    listed = [(buffer, regions) for buffer, regions in buffers if regions[0].role in roles]
    return sorted(listed, key=lambda pair: (roles.index(pair[1][0].role), pair[1][0].layer))


def column(rows: list[ListRow], number: int) -> list[Any]:
    """The values of a list."""
    return [row[number] for row in rows if number < len(row)]


def row(layout: PoolLayout, buffer: Buffer) -> ListRow:
    """A buffer's pointer, bytes, and bytes of what SGLang counts as an item: a page, a slot, the
    ring of a page of the window, or the part of a request's ring with an open window.
    """
    if buffer.items > 1 and buffer.item_bytes != buffer.item_stride:
        raise LayoutError(
            f"buffer {buffer.name}: items of {buffer.item_bytes} bytes every {buffer.item_stride}. "
            "Pages of several layers side by side are not in SGLang's lists: build the pool with "
            "placement='layer'."
        )
    space, item = layout.space_by_name[buffer.space], buffer.item_stride
    if space.kind == "ring":
        item //= space.entries_per_item // space.window_step
    elif space.window_step > 1:
        item *= space.reserved
    return buffer.base, buffer.items * buffer.item_stride, item


def sliced(regions: list[Region]) -> ListRow:
    """The layer of a state of linear attention, and what tensor parallelism cuts of it: its size on
    this rank, how many rows are before it, and of a conv state of q, k and v the channels of each
    in the model.
    """
    sections, rows = sharded(regions)
    delta_net = [section.role for section in sections] == ["conv.q", "conv.k", "conv.v"]
    groups = [section.total for section in sections] if delta_net else None
    return regions[0].layer, sum(section.size for section in sections), rows, groups
