"""What SGLang's memory pools keep: the table of its pool classes, read by their public attributes.

A pool is recognised by the names of its class and of those that it inherits from; nothing of
SGLang is imported. Page 0 and slot 0 are padding. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearKind, LinearShard, tensor_states
from disagg.connectors.sglang.deepseek import read_dsa, read_dsv4, read_mla, read_npu_mla
from disagg.connectors.sglang.layer_set import LayerSet, PoolReader, Ranks
from disagg.connectors.tensors import (
    PlacedTensor,
    UnknownFormat,
    naming,
)
from kvpool.item import Cell
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name

HERE = "add it to disagg/connectors/sglang/states.py"
ORDERS = ("nhd", "hnd")
"""Of tokens and heads in a page, by SGLang's names."""


def read_heads(
    pool: Any, layers: LayerSet, buffers: Sequence[torch.Tensor], cell: Cell, order: str
) -> Iterator[PlacedTensor]:
    """A cell for each token and head. `order`: that of both, or the name of one that only a kernel
    knows.
    """
    heads = layers.ranks.heads(pool.head_num)
    form = partial(formats.head_rows, row=cell, heads=heads)
    if order == "nhd":
        buffers = [formats.paged(buffer, pool.page_size, pool.head_num) for buffer in buffers]
    elif order not in ORDERS:
        form = partial(formats.packed_heads, row=cell, packing=order, heads=heads)
    yield from layers.tensors(buffers, form)


def read_mha(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """K and V apart: a page of either is `[token, head, dim]` or `[head, token, dim]`."""
    if getattr(pool, "is_quantized_kv_cache", False):
        raise UnknownFormat(
            f"KV quantised by {type(pool.quant_method).__name__} is not known. Use "
            "--kv-cache-dtype auto or fp8_e4m3."
        )
    order = pool.kv_cache_layout
    if order not in (*ORDERS, "vectorized_5d"):
        raise UnknownFormat(
            f"kv_cache_layout {order!r} is not known (known: {', '.join(ORDERS)}, vectorized_5d)."
        )
    for role, buffers, dim in (
        ("k", pool.k_buffer, pool.head_dim),
        ("v", pool.v_buffer, pool.v_head_dim),
    ):
        name = order
        if order not in ORDERS:  # dim and tokens are cut in tiles
            name = f"sglang {order} {role}, {pool.page_size} x {dim} by {buffers[0].shape[-1]}"
        yield from read_heads(pool, layers, buffers, Cell(role, dim, dtype_name(pool.dtype)), name)


def read_mxfp8(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """K and V, and a scale for 32 elements of each; in pages of 128, in the order of a kernel."""
    yield from read_mha(pool, layers)
    for role, buffers in (("k.scale", pool.k_scale_buffer), ("v.scale", pool.v_scale_buffer)):
        *_, count = shape = buffers[0].shape[2:]
        order = "nhd"
        if pool.mxfp8_sf_interleaved:
            order = f"sglang mxfp8 scales, {' x '.join(map(str, shape))}"
        yield from read_heads(pool, layers, buffers, Cell(role, count, "ue8m0"), order)


def read_swa(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """A pool of layers that see every token, and one of those that see a window."""
    if layers.ranks.window is None:
        raise UnknownFormat("sliding_window_size is None. Pass that of the scheduler.")
    window = Space("swa", entries_per_item=pool.page_size, window=layers.ranks.window)
    for part, slides in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
        places = {place: n for n, (place, swa) in pool.layers_mapping.items() if swa == slides}
        holders = replace(layers, numbers=[places[place] for place in sorted(places)])
        if slides:
            holders = replace(holders, space=window, prefix="swa.")
        if places:
            yield from read(part, holders)


def read_hybrid(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """A pool of the layers of attention, and the slots of those of linear attention."""
    attention = replace(layers, numbers=[*pool.full_attention_layer_id_mapping])
    yield from read(pool.full_kv_pool, attention)
    yield from read(pool.mamba_pool, layers)


def read_mamba(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """A slot a request: the conv state, `[channel, tap]` or `[tap, channel]`, and the temporal."""
    cache, ranks = pool.mamba_cache, layers.ranks
    if len(cache.conv) != 1 or len(getattr(pool, "_slot_siblings", ())):
        raise UnknownFormat(
            f"{len(cache.conv)} conv states, and states beside them, are not known. Use another "
            f"model, or {HERE}."
        )
    (conv,), temporal = cache.conv, cache.temporal
    kind: LinearKind = "delta_net" if pool.conv_shard_groups else "mamba2"
    if kind == "mamba2" and temporal.shape[3] == 1:
        kind, temporal = "mamba1", temporal.squeeze(3)
    if getattr(pool, "conv_slice_axis", 0) == 1:
        conv = conv.transpose(2, 3)
    holders = replace(layers, numbers=pool.mamba_layer_ids, space=Space("state", "slot"))
    shard = LinearShard(
        rank=ranks.tp_rank,
        ranks=ranks.tp_size,
        groups=ranks.groups,
        # its kernels write [head, key, value]
        key_first=pool.device == "cpu",
    )
    for tensors, form in tensor_states(kind, conv, temporal, shard):
        yield from holders.tensors(tensors, form)


POOLS: Mapping[str, PoolReader] = {
    "MHATokenToKVPool": read_mha,
    "NPUMHATokenToKVPool": read_mha,
    "MHATokenToKVPoolMXFP8": read_mxfp8,
    "MLATokenToKVPool": read_mla,
    "DSATokenToKVPool": read_dsa,
    "NPUMLATokenToKVPool": read_npu_mla,
    "SWAKVPool": read_swa,
    "HybridLinearKVPool": read_hybrid,
    "MambaPool": read_mamba,
    "DeepSeekV4TokenToKVPool": read_dsv4,
}
"""How a pool is read, by the name of its class."""
MAKES = ("__init__", "_create_buffers", "get_contiguous_buf_infos", "get_state_buf_infos")
"""A class that overrides one of these keeps something else than the one that it inherits from."""


def reader(kind: type) -> PoolReader:
    """How pools of a class are read. Raises UnknownFormat, with what is known."""
    for base in kind.__mro__:
        if base.__name__ in POOLS:
            return POOLS[base.__name__]
        if any(name in vars(base) for name in MAKES):
            break
    raise UnknownFormat(f"not known (known: {', '.join(POOLS)}). Use another pool, or {HERE}.")


def read(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """The states of a pool."""
    name = type(pool).__name__
    with naming(name):
        yield from reader(type(pool))(pool, replace(layers, pool=f"{layers.pool}: {name}"))


def read_pool(pool: Any, ranks: Ranks, owner: str = "target") -> list[PlacedTensor]:
    """The states of a whole pool. Layers of a draft are numbered from 0."""
    first, count = getattr(pool, "start_layer", 0), getattr(pool, "layer_num", 0)
    layers = LayerSet(
        ranks=ranks,
        owner=owner,
        numbers=range(first, first + count),
        space=Space("kv", entries_per_item=getattr(pool, "page_size", 1)),
        pool=owner,
    )
    with naming(owner):
        tensors = [*read(pool, layers)]
    if owner == "target":
        return tensors
    numbers = sorted({layer.number for _, layer in tensors})
    return [(space, replace(layer, number=numbers.index(layer.number))) for space, layer in tensors]
