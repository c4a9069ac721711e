"""What SGLang's memory pools keep: the table of its pool classes, read by their public attributes.

A pool is recognised by the names of its class and of those that it inherits from; nothing of
SGLang is imported. Page 0 and slot 0 are padding. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from disagg.connectors.linear_states import LinearKind, LinearShard, states
from disagg.connectors.sglang import fp4
from disagg.connectors.tensors import (
    LayerTensor,
    PlacedTensor,
    TensorPart,
    UnknownFormat,
    head_items,
    head_rows,
    head_shard,
    items,
    naming,
    rows,
)
from kvpool.item import Cell, Template
from kvpool.layout import Space
from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.formats import fp8_latent_row, index_key_page, latent_row, v4_latent_page

HERE = "add it to disagg/connectors/sglang/states.py"
ORDERS = ("nhd", "hnd")
"""Of tokens and heads in a page, by SGLang's names."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the pools of a rank do not say: its place in attention's tensor parallelism, the model's
    KV heads, the tokens before a position that its sliding `window` sees (the scheduler's
    `sliding_window_size`), its `groups` of Mamba-2's B and C, and the layers that see that window,
    whether or not their pool holds more (`sliding`).
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 1
    window: int | None = None
    groups: int = 0
    sliding: Collection[int | None] = ()


@dataclass(frozen=True, kw_only=True)
class LayerSet:
    """Layers of one pool. `prefix` precedes their roles; `pool` names it in what is refused."""

    ranks: Ranks
    owner: str
    numbers: Sequence[int]
    space: Space
    prefix: str = ""
    pool: str

    def tensors(self, views: Iterable[torch.Tensor], part: TensorPart) -> Iterator[PlacedTensor]:
        """A tensor of each of the layers, in their order, which is all of one part."""
        for number, view in zip(self.numbers, views, strict=True):
            slides = self.owner == "target" and number in self.ranks.sliding
            prefix = self.prefix or ("swa." if slides else "")
            name, owner = f"{self.pool} layer {number}", self.owner
            layer = LayerTensor(
                name=name, number=number, view=view, parts=[part], owner=owner, prefix=prefix
            )
            yield self.space, layer


PoolReader = Callable[[Any, LayerSet], Iterator[PlacedTensor]]
"""Yields the tensors of a pool, which holds these layers."""


def paged(tensor: torch.Tensor, page: int, heads: int = 1) -> torch.Tensor:
    """A view of rows `[token, head, content]`, in any number of dims, in pages of `page` tokens."""
    tokens = tensor.view(-1, heads, tensor.shape[-1])
    pages = len(tokens) // page
    return tokens[: pages * page].view(pages, page, heads, -1).transpose(1, 2)


def read_heads(
    pool: Any, layers: LayerSet, buffers: Sequence[torch.Tensor], cell: Cell, order: str
) -> Iterator[PlacedTensor]:
    """A cell a token and head. `order`: that of both, or the name of one that a kernel knows."""
    ranks = layers.ranks
    heads = head_shard(pool.head_num, ranks.total_kv_heads, ranks.tp_rank, ranks.tp_size)
    if order == "nhd":
        buffers = [paged(buffer, pool.page_size, pool.head_num) for buffer in buffers]
    if order in ORDERS:
        return layers.tensors(buffers, head_rows(cell, heads))
    count = buffers[0][0, 0].nbytes // ITEMSIZE[cell.dtype]  # of a head's part of an item
    return layers.tensors(buffers, head_items(replace(cell, count=count), heads, order))


def read_mha(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """K and V apart: a page of either is `[token, head, dim]` or `[head, token, dim]`."""
    if getattr(pool, "is_quantized_kv_cache", False) and fp4.is_fp4(pool):
        yield from read_fp4(pool, layers)
        return
    order = pool.kv_cache_layout
    if order not in (*ORDERS, "vectorized_5d"):
        raise UnknownFormat(
            f"kv_cache_layout {order!r} is not known (known: {', '.join(ORDERS)}, vectorized_5d)."
        )
    planes = ("k", pool.k_buffer, pool.head_dim), ("v", pool.v_buffer, pool.v_head_dim)
    for role, buffers, dim in planes:
        name = order
        if order not in ORDERS:  # dim and tokens are cut in tiles
            name = f"sglang {order} {role}, {pool.page_size} x {dim} by {buffers[0].shape[-1]}"
        yield from read_heads(pool, layers, buffers, Cell(role, dim, dtype_name(pool.dtype)), name)


def read_fp4(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """K and V, and a scale for 16 elements of each."""
    for buffers, cell in fp4.head_planes(pool):
        yield from read_heads(pool, layers, buffers, cell, "nhd")


def read_fp4_mla(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    for buffers, row in fp4.latent_rows(pool):
        yield from layers.tensors((paged(t, pool.page_size) for t in buffers), rows(row))


def read_mxfp8(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """K and V, and a scale for 32 elements of each; in pages of 128, in the order of a kernel."""
    yield from read_mha(pool, layers)
    for role, buffers in (("k.scale", pool.k_scale_buffer), ("v.scale", pool.v_scale_buffer)):
        shape = buffers[0].shape[2:]
        tiles = f"sglang mxfp8 scales, {' x '.join(map(str, shape))}"
        order = tiles if pool.mxfp8_sf_interleaved else "nhd"
        yield from read_heads(pool, layers, buffers, Cell(role, shape[-1], "ue8m0"), order)


def read_mla(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Rows of latent and rope, the same on every rank."""
    row: Template = latent_row(pool.kv_lora_rank, pool.qk_rope_head_dim, dtype_name(pool.dtype))
    if pool.dsa_kv_cache_store_fp8:
        row = fp8_latent_row()
    views = (paged(tensor, pool.page_size) for tensor in pool.kv_buffer)
    yield from layers.tensors(views, rows(row))


def read_index_keys(pool: Any, layers: LayerSet, page: int) -> Iterator[PlacedTensor]:
    """Pages of index keys in fp8, then of their scales."""
    item = index_key_page(page, pool.index_head_dim, dtype="e4m3", scale="float32")
    tensors = zip(layers.numbers, pool.index_k_with_scale_buffer)
    keys = {n: tensor for n, tensor in tensors if len(tensor)}  # others reuse another's top-k
    views = (tensor.view(len(tensor), 1, page, -1) for tensor in keys.values())
    yield from replace(layers, numbers=[*keys]).tensors(views, items(item))


def read_dsa(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    yield from read_mla(pool, layers)
    if pool.index_kpool > 1 or torch.version.hip:
        raise UnknownFormat(
            f"index keys of {pool.index_kpool} tokens, and those of ROCm, are not known. Use a "
            f"model with a key a token on another device, or {HERE}."
        )
    yield from read_index_keys(pool, layers, pool.page_size)


def read_npu_mla(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Latent, rope, index keys and their scales in tensors of their own, layers stacked."""
    if pool.k_buffer is None:
        raise UnknownFormat("its device cache is turned off (SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD).")
    page = pool.page_size
    if pool.use_fia_nz or pool.index_page_size != page:
        raise UnknownFormat(
            f"use_fia_nz {pool.use_fia_nz} and index pages of {pool.index_page_size} beside pages "
            f"of {page} are not known. Unset SGLANG_USE_FIA_NZ, and use equal pages."
        )
    dtype, slots = dtype_name(pool.dtype), pool.indexer_layer_id_to_slot
    numbers = [layers.numbers[layer - pool.start_layer] for layer in slots]
    indexed = replace(layers, numbers=numbers)
    for role, holders, stacked, kind in (
        ("latent", layers, pool.k_buffer, dtype),
        ("rope", layers, pool.v_buffer, dtype),
        ("index_key", indexed, pool.index_k_buffer, dtype),
        ("index_key.scale", indexed, pool.index_k_scale_buffer, "float32"),
    ):
        if stacked is None or not stacked.numel():
            continue
        is_row = role == "latent" and pool.dsa_kv_cache_store_fp8
        part = rows(fp8_latent_row() if is_row else Cell(role, stacked.shape[-1], kind))
        yield from holders.tensors((paged(tensor, page) for tensor in stacked), part)


def read_swa(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """A pool of layers that see every token, and one of those that see a window: in pages of the
    window, or (of a draft's MTP modules) in those of all tokens.
    """
    full, swa = layers, replace(layers, prefix="swa.")
    if not pool.swa_uses_full_indices:
        if layers.ranks.window is None:
            raise UnknownFormat("sliding_window_size is None. Pass that of the scheduler.")
        window = Space("swa", entries_per_item=pool.page_size, window=layers.ranks.window)
        swa = replace(swa, space=window)
    for part, slides, holders in (pool.full_kv_pool, False, full), (pool.swa_kv_pool, True, swa):
        places = {i: n for n, (i, is_swa) in pool.layers_mapping.items() if is_swa == slides}
        if places:
            yield from read(part, replace(holders, numbers=[places[i] for i in sorted(places)]))


def read_hybrid(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """A pool of the layers of attention. Those of linear attention have slots: `slot_pools`."""
    numbers = [*pool.full_attention_layer_id_mapping]
    yield from read(pool.full_kv_pool, replace(layers, numbers=numbers))


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
    dim_first = conv.stride(2) >= conv.stride(3)
    conv = conv if dim_first else conv.transpose(2, 3)  # in the order of its bytes
    shard = LinearShard(
        rank=ranks.tp_rank,
        ranks=ranks.tp_size,
        groups=ranks.groups,
        dim_first=dim_first,
        key_first=pool.device == "cpu",  # its kernels write [head, key, value]
    )
    dtypes = conv.dtype, temporal.dtype
    parts = states(kind, (conv.shape[2], conv.shape[3]), temporal.shape[2:], dtypes, shard)
    holders = replace(layers, numbers=pool.mamba_layer_ids, space=Space("state", "slot"))
    for tensor, item in zip((conv, temporal), parts):
        yield from holders.tensors(tensor, items(item))


def read_dsv4(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Latents of the window; on layers that compress, latents of 4 or 128 tokens (of 4 with index
    keys), and the tokens that are not yet compressed: in a ring for each page of the window (4), or
    for each request (128).
    """
    fits = {
        "kv_layout": str(getattr(pool.kv_layout, "value", pool.kv_layout)) == "v4",
        "uniform_fp8": not pool.uniform_fp8,
        "unified_kv_pool": pool.unified_kv_pool is None,
        "request_window": pool.request_window is None,
        "swa_req_ring_size": pool.swa_req_ring_size is None,
        "online": not any(ring and ring.online for ring in pool.compress_state_pools),
        "compression_ratios": set(pool.compression_ratios) <= {0, 4, 128},
        "index_pools": not any(keys.use_fp4_indexer for keys in pool.index_pools.values()),
        "c4_kv_pool": "HiSparse" not in type(pool.kv_pools.get(4)).__name__,
    }
    if wrong := ", ".join(name for name, is_known in fits.items() if not is_known):
        raise UnknownFormat(
            f"{wrong}: known are paged latents of DeepSeek-V4 in fp8, compressed 4 and 128 to one, "
            f"their index keys in fp8, and rings of tokens. Use those, or {HERE}."
        )
    ratios = {n: layer.compress_ratio for n, layer in enumerate(pool.layer_mapping) if layer}
    page = pool.swa_kv_pool.page_size
    space = Space("swa", entries_per_item=page, window=pool.sliding_window - 1)
    sliding = replace(layers, numbers=[*ratios], space=space, prefix="swa.")
    yield from sliding.tensors(pool.swa_kv_pool.kv_buffer, items(v4_latent_page(page)))
    for ratio in sorted({*ratios.values()} - {0}):
        numbers = [n for n in ratios if ratios[n] == ratio]
        yield from read_compressed(pool, replace(layers, numbers=numbers), ratio)


def read_compressed(pool: Any, layers: LayerSet, ratio: int) -> Iterator[PlacedTensor]:
    """Latents, index keys and rings of layers that keep one latent for `ratio` tokens."""
    entries = pool.page_size // ratio
    space = Space(f"c{ratio}", entries_per_item=entries, tokens_per_entry=ratio, ids="kv")
    layers = replace(layers, space=space, prefix=f"c{ratio}.")
    yield from layers.tensors(pool.kv_pools[ratio].kv_buffer, items(v4_latent_page(entries)))
    if ratio in pool.index_pools:
        yield from read_index_keys(pool.index_pools[ratio], layers, entries)
    rings = {"state": pool.compress_state_pools, "index_state": pool.indexer_compress_state_pools}
    for role, number in product(rings, layers.numbers):
        if (ring := rings[role][number]) is not None:
            yield from read_ring(ring, replace(layers, numbers=[number]), role, ratio)


def read_ring(ring: Any, layer: LayerSet, role: str, ratio: int) -> Iterator[PlacedTensor]:
    """A layer's tokens that are not yet compressed: to 4 those of the last two windows, in a ring
    of each page of the sliding window; to 128 those of the open one, in a ring of each request.
    """
    tokens, size = ring.kv_score_buffer.kv_score, ring.ring_size
    space = Space("c128.ring", "ring", size, window=0, window_step=ratio)
    if ratio == 4:
        page = ring.swa_page_size
        space = Space("c4.ring", entries_per_item=page, window=4, window_step=4, ring=size)
    row = rows(Cell(role, tokens.shape[-1], dtype_name(tokens.dtype)))
    yield from replace(layer, space=space).tensors([paged(tokens, size)], row)


POOLS: Mapping[str, PoolReader] = {
    "MHATokenToKVPool": read_mha,
    "NPUMHATokenToKVPool": read_mha,
    "MHATokenToKVPoolMXFP8": read_mxfp8,
    "MHATokenToKVPoolFP4": read_fp4,
    "MLATokenToKVPool": read_mla,
    "MLATokenToKVPoolFP4": read_fp4_mla,
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
    name = type(pool).__name__
    with naming(name):
        yield from reader(type(pool))(pool, replace(layers, pool=f"{layers.pool}: {name}"))


def read_pool(pool: Any, ranks: Ranks, owner: str) -> list[PlacedTensor]:
    """The states of a whole pool."""
    first, count = getattr(pool, "start_layer", 0), getattr(pool, "layer_num", 0)
    space = Space("kv", entries_per_item=getattr(pool, "page_size", 1))
    numbers: Sequence[int] = range(first, first + count)
    layers = LayerSet(ranks=ranks, owner=owner, numbers=numbers, space=space, pool=owner)
    with naming(owner):
        return [*read(pool, layers)]
