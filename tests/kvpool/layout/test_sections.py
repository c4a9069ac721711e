"""Dims that hold several roles one after the other, described by their sections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpool.describe import Section, describe, describe_buffer, describe_sections
from kvpool.layout import LayoutError, PoolLayout, Space
from kvpool.layout.formats import MHA, Shard, gated_delta_net, kda, mamba2
from kvpool.pools.typed import HybridLinearPool
from tests.oracle import state

GDN = {"k_heads": 2, "v_heads": 4, "k_dim": 3, "v_dim": 5, "kernel": 4}
LINEAR = {
    "gdn": lambda order: gated_delta_net(**GDN, conv_layout=order),
    "kda": lambda order: kda(heads=4, dim=3, kernel=3, conv_layout=order),
    "mamba2": lambda order: mamba2(
        heads=8, head_dim=2, groups=2, state_size=3, kernel=4, conv_layout=order
    ),
}
ORDERS = {"channels_first": ("item", "channel", "tap"), "taps_first": ("item", "tap", "channel")}


def pool(linear, shard=Shard(), device="cpu"):
    return HybridLinearPool(
        layers=range(4),
        full=MHA(8, 4),
        linear=linear,
        linear_layers=[1, 3],
        page_size=4,
        num_pages=12,
        num_slots=5,
        dtype="bf16",
        shard=shard,
        device=device,
    )


def sections(linear, shard=Shard()):
    """What a rank of an engine knows of its conv states."""
    found = []
    for name, heads, dim in linear.sections:
        start, size = shard.of(heads)
        found.append(Section(f"conv.{name}", {"head": size, "dim": dim}, {"head": (start, heads)}))
    return found


def conv_states(held, buffer, linear, shard):
    """The memory of a buffer as an engine's tensor `[slot, channel, tap]` or `[slot, tap,
    channel]`.
    """
    channels = sum(shard.of(heads)[1] * dim for _, heads, dim in linear.sections)
    shape = {"item": buffer.items, "channel": channels, "tap": linear.taps}
    whole = torch.from_numpy(state(held).memory[0]).view(torch.bfloat16)
    at = (buffer.base - whole.data_ptr()) // 2
    size = buffer.items * buffer.item_bytes // 2
    return whole[at : at + size].view([shape[dim] for dim in ORDERS[linear.conv_layout]])


def described(held, linear, shard=Shard()):
    """The pool's own memory, its conv states described as an engine's tensors."""
    layout = held.layout
    buffers, regions = dict(layout.buffer_by_name), []
    for layer in (1, 3):
        first = "target", layer, f"conv.{linear.sections[0][0]}"
        old = layout.buffer_of(layout.region_by_key[first])
        seen = describe_sections(
            conv_states(held, old, linear, shard),
            ORDERS[linear.conv_layout],
            "channel",
            sections(linear, shard),
            layer=layer,
            space="state",
            cell=None,
        )
        del buffers[old.name]
        buffers[seen.buffers[0].name] = seen.buffers[0]
        regions.extend(seen.regions)
    others = [r for r in layout.regions if not r.role.startswith("conv.")]
    return PoolLayout((*buffers.values(),), (*others, *regions), layout.spaces, 4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("shard", [Shard(), Shard(3, 4)])
def test_a_pools_conv_states_described_are_its_own_regions(name, order, shard):
    linear = LINEAR[name](order)
    held = pool(linear, shard)
    made = described(held, linear, shard)
    for region in held.layout.regions:
        again = made.region_by_key[region.key]
        assert replace(again, buffer=region.buffer) == region
        ours, theirs = made.buffer_of(again), held.layout.buffer_of(region)
        assert replace(ours, name=theirs.name, padding=theirs.padding) == theirs


def test_k_and_v_of_one_token_and_head_are_sections_with_a_cell_each():
    tensor = torch.zeros(5, 2, 16, 24, dtype=torch.bfloat16)  # [item, head, entry, K | V]
    dims = ("item", "head", "entry", "kv")
    seen = describe_sections(
        tensor,
        dims,
        "kv",
        [Section("k", {"dim": 16}), Section("v", {"dim": 8})],
        layer=3,
        shards={"head": (2, 4)},
    )
    home = describe_buffer(tensor, dims, name="target.k+v.3")
    one, two = (
        describe(part, (*dims[:3], "dim"), role=role, layer=3, shards={"head": (2, 4)}, buffer=home)
        for role, part in (("k", tensor[..., :16]), ("v", tensor[..., 16:]))
    )
    assert (seen.buffers, seen.regions) == ((home,), one.regions + two.regions)
    PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=16),), 4)


@pytest.mark.parametrize(
    ("parts", "cut", "says"),
    [
        ([("q", 2), ("k", 3)], "channel", r"channel has 6 elements, its sections 5 \(q 2, k 3\)"),
        ([("q", 6), ("k", 0)], "channel", r"channel has 6 elements, its sections 6 \(q 6, k 0\)"),
        ([], "channel", r"channel has 6 elements, its sections 0 \(none\)"),
        ([("q", 6)], "head", r"\['q'\]: 'head' is no inner dim of \('item', 'tap', 'channel'\)"),
        ([("q", 6)], "item", r"\['q'\]: 'item' is no inner dim"),
    ],
)
def test_sections_that_are_not_all_of_a_dim_are_refused(parts, cut, says):
    given = [Section(role, {"head": size}) for role, size in parts]
    with pytest.raises(LayoutError, match=says):
        describe_sections(
            torch.zeros(5, 3, 6), ("item", "tap", "channel"), cut, given, layer=0, cell=None
        )
