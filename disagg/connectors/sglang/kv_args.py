"""The fields of SGLang's own `KVArgs`, from a layout: for those who keep SGLang's own transports.

SGLang pairs buffers by their places in lists: `k0..kL, v0..vL`, or a row a layer; a draft's after
the target's; the components of other state in lists of lists. Read in SGLang 0.5.23.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvpool.layout import Buffer, LayoutError, PoolLayout, Region

MAIN = (
    *("k", "v", "latent", "rope"),
    *("c4.latent", "c4.index_key", "c128.latent"),
)
"""First roles of the buffers of pages, in SGLang's order."""
STATES = (
    ("swa", ("swa.k", "swa.v", "swa.latent", "c4.state", "c4.index_state")),
    ("block_scale", ("k.scale", "v.scale")),
    ("block_scale_swa", ("swa.k.scale", "swa.v.scale")),
    ("c128_state", ("c128.state",)),
    ("mamba", ("conv.", "temporal")),
    ("dsa", ("index_key",)),
)
"""Components of other state, in SGLang's order, and the first roles of their buffers."""

Rows = list[tuple[Buffer, list[Region]]]


@dataclass
class Fields:
    """Fields of `KVArgs` of these names. Lists of lists have a list for each of `state_types`."""

    kv_data_ptrs: list[int] = field(default_factory=list)
    kv_data_lens: list[int] = field(default_factory=list)
    kv_item_lens: list[int] = field(default_factory=list)
    kv_layer_ids: list[int] = field(default_factory=list)
    num_draft_entries: int = 0
    page_size: int = 1
    prefill_start_layer: int = 0
    prefill_end_layer: int = 0
    kv_head_num: int = 0
    total_kv_head_num: int = 0
    state_types: list[str] = field(default_factory=list)
    state_data_ptrs: list[list[int]] = field(default_factory=list)
    state_data_lens: list[list[int]] = field(default_factory=list)
    state_item_lens: list[list[int]] = field(default_factory=list)
    state_layer_ids: list[list[int]] = field(default_factory=list)
    state_dim_per_tensor: list[list[int]] = field(default_factory=list)
    state_slice_outer_counts: list[list[int]] = field(default_factory=list)
    state_conv_shard_groups: list[list[list[int] | None]] = field(default_factory=list)

    def fill(self, args: Any) -> None:
        """Sets them in a `KVArgs`. SGLang's `StateType` takes the names in `state_types`."""
        for each in fields(self):
            setattr(args, each.name, getattr(self, each.name))


def kv_args(layout: PoolLayout) -> Fields:
    """The lists of a rank's pools.

    Raises LayoutError, which names the buffer, where its items are not one after the other: SGLang
    takes a page's address for pointer + id * item length.
    """
    inside: dict[str, list[Region]] = {}
    for region in sorted(layout.regions, key=lambda region: region.offset):
        inside.setdefault(region.buffer, []).append(region)
    held = [(layout.buffer_by_name[name], regions) for name, regions in inside.items()]
    page = layout.space_by_name["kv"].tokens_per_item
    linear = any(space.kind == "slot" for space in layout.spaces)
    # with a rope of their own, index keys are listed with the pages, as on an NPU
    split = any(regions[0].role == "rope" for _, regions in held)
    main = (*MAIN, "index_key", "index_key.scale") if split else MAIN
    target = [each for each in held if each[1][0].owner == "target"]
    layers = [region.layer for _, regions in target for region in regions]
    made = Fields(page_size=page)
    made.prefill_start_layer, made.prefill_end_layer = min(layers), max(layers) + 1
    for owner in ("target", "draft"):
        mine = [each for each in held if each[1][0].owner == owner]
        listed = [*ordered(mine, main)]
        made.kv_data_ptrs += [buffer.base for buffer, _ in listed]
        made.kv_data_lens += [buffer.items * buffer.item_stride for buffer, _ in listed]
        made.kv_item_lens += [item_bytes(layout, buffer) for buffer, _ in listed]
        if linear:  # SGLang names layers here, and elsewhere counts on their order
            first = layout.total_kv_layers if owner == "draft" else 0
            made.kv_layer_ids += [first + regions[0].layer for _, regions in listed]
        made.num_draft_entries = len(listed) if owner == "draft" else 0
        for kind, roles in STATES:
            state = [*ordered(mine, roles)] if not (split and kind == "dsa") else []
            if state:
                add_state(made, kind, layout, state, owner)
    heads = [region.axis("head") for _, regions in target for region in regions]
    for axis in [axis for axis in heads if axis is not None][:1]:
        made.kv_head_num, made.total_kv_head_num = axis.size, axis.total
    return made


def ordered(held: Rows, roles: Sequence[str]) -> Iterator[tuple[Buffer, list[Region]]]:
    """Buffers by their first role, in the order of `roles`, then by layer."""
    for role in roles:
        found = [
            each
            for each in held
            if each[1][0].role == role or (role[-1] == "." and each[1][0].role.startswith(role))
        ]
        yield from sorted(found, key=lambda each: each[1][0].layer)


def item_bytes(layout: PoolLayout, buffer: Buffer) -> int:
    """Bytes that SGLang counts as an item: a page, a slot, the ring of a page of the window, or the
    part of a request's ring with an open window.
    """
    if buffer.items > 1 and buffer.item_bytes != buffer.item_stride:
        raise LayoutError(
            f"buffer {buffer.name}: items of {buffer.item_bytes} bytes every {buffer.item_stride}. "
            "Pages of several layers side by side are not in SGLang's lists: build the pool with "
            "placement='layer'."
        )
    space = layout.space_by_name[buffer.space]
    if space.kind == "ring":
        return buffer.item_stride // (space.entries_per_item // space.window_step)
    return buffer.item_stride * (space.reserved if space.window_step > 1 else 1)


def add_state(made: Fields, kind: str, layout: PoolLayout, held: Rows, owner: str) -> None:
    """Adds a component, or a draft's buffers to the target's of that kind; SGLang has those of a
    draft's window apart.
    """
    if owner == "target" or kind == "swa" or kind not in made.state_types:
        made.state_types.append(kind)
        for each in fields(made):
            if each.name.startswith("state_") and each.name != "state_types":
                getattr(made, each.name).append([])
        at = -1
    else:
        at = made.state_types.index(kind)
    for buffer, regions in held:
        made.state_data_ptrs[at].append(buffer.base)
        made.state_data_lens[at].append(buffer.items * buffer.item_stride)
        made.state_item_lens[at].append(item_bytes(layout, buffer))
        if kind == "mamba":
            channels, taps, groups = sliced(regions)
            made.state_layer_ids[at].append(regions[0].layer)
            made.state_dim_per_tensor[at].append(channels)
            made.state_slice_outer_counts[at].append(taps)
            made.state_conv_shard_groups[at].append(groups)


def sliced(regions: list[Region]) -> tuple[int, int, list[int] | None]:
    """What tensor parallelism cuts of a state of linear attention: its size on this rank, how many
    rows are before it, and of a conv state of q, k and v the channels of each in the model.
    """
    sizes = [{axis.name: axis for axis in region.axes} for region in regions]
    if regions[0].role == "temporal":
        return sizes[0]["head"].size, 1, None
    channels = sum(axes["head"].size * axes["dim"].size for axes in sizes)
    tap, dim = sizes[0]["tap"], sizes[0]["dim"]
    delta_net = [region.role for region in regions] == ["conv.q", "conv.k", "conv.v"]
    groups = [axes["head"].total * axes["dim"].size for axes in sizes] if delta_net else None
    return channels, tap.size if tap.stride > dim.stride else 1, groups


def pack_int_lists(lists: Sequence[Sequence[int]], code: str) -> bytes:
    """Nested lists as SGLang's peers read them: how many lists, the bytes of each, then their
    numbers, all little-endian; `code` is the numbers' in `struct`. No lists are no bytes.
    """
    if not lists:
        return b""
    packed = [struct.pack(f"<{len(each)}{code}", *each) for each in lists]
    return struct.pack(f"<{len(packed) + 1}I", len(packed), *map(len, packed)) + b"".join(packed)
