"""What SGLang's memory pools keep: the table of its pool classes, read by their public attributes.

A pool is recognised by the names of its class and of those that it inherits from; nothing of
SGLang is imported. Page 0 and slot 0 are padding. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearKind, tensor_states
from disagg.connectors.tensors import Format, Layer, UnknownFormat, naming
from kvpool.item import Cell, Template
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import Heads, fp8_latent_row

HERE = "add it to disagg/connectors/sglang/states.py"
ORDERS = ("nhd", "hnd")
"""Of tokens and heads in a page, by SGLang's names."""

DSV4_UNUSED = ("unified_kv_pool", "request_window", "swa_req_ring_size")
"""What pools of DeepSeek-V4 that are known do without."""


class Ranks(NamedTuple):
    """What the pools of a rank do not say.

    `tp_rank`, `tp_size`: its place in attention's tensor parallelism. `total_kv_heads`: those of
    the model. `window`: the tokens before a position that its sliding window sees (the scheduler's
    `sliding_window_size`). `groups`: Mamba-2's B and C in the model. `sliding`: layers that see
    that window, whether or not their pool holds more.
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 1
    window: int | None = None
    groups: int = 0
    sliding: Collection[int | None] = ()

    def heads(self, held: int) -> Heads:
        """The `held` heads of this rank."""
        return formats.head_shard(held, self.total_kv_heads, self.tp_rank, self.tp_size)


class At(NamedTuple):
    """Where a pool's states lie: the numbers of its layers, the space of its pages, what precedes
    its roles, whose they are, and what the pool is called.
    """

    ranks: Ranks
    owner: str
    layers: Sequence[int]
    space: Space
    prefix: str = ""
    name: str = ""

    def tensors(self, views: Iterable[torch.Tensor], form: Format) -> Iterator[State]:
        """A tensor of each of the pool's layers, in their order, which holds `form`."""
        for layer, view in zip(self.layers, views, strict=True):
            slides = self.owner == "target" and layer in self.ranks.sliding
            about = f"{self.name} layer {layer}", layer, view, form, self.owner
            yield self.space, Layer(*about, self.prefix or ("swa." if slides else ""))


State = tuple[Space, Layer]
Reader = Callable[[Any, At], Iterator[State]]


def read_heads(
    pool: Any, at: At, buffers: Sequence[torch.Tensor], cell: Cell, order: str
) -> Iterator[State]:
    """A cell for each token and head. `order`: that of both, or the name of one that only a kernel
    knows.
    """
    heads = at.ranks.heads(pool.head_num)
    form = partial(formats.head_rows, row=cell, heads=heads)
    if order == "nhd":
        buffers = [formats.paged(buffer, pool.page_size, pool.head_num) for buffer in buffers]
    elif order not in ORDERS:
        form = partial(formats.packed_heads, row=cell, packing=order, heads=heads)
    yield from at.tensors(buffers, form)


def read_mha(pool: Any, at: At) -> Iterator[State]:
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
        yield from read_heads(pool, at, buffers, Cell(role, dim, dtype_name(pool.dtype)), name)


def read_mxfp8(pool: Any, at: At) -> Iterator[State]:
    """K and V, and a scale for 32 elements of each; in pages of 128, in the order of a kernel."""
    yield from read_mha(pool, at)
    for role, buffers in (("k.scale", pool.k_scale_buffer), ("v.scale", pool.v_scale_buffer)):
        *_, count = shape = buffers[0].shape[2:]
        order = "nhd"
        if pool.mxfp8_sf_interleaved:
            order = f"sglang mxfp8 scales, {' x '.join(map(str, shape))}"
        yield from read_heads(pool, at, buffers, Cell(role, count, "ue8m0"), order)


def read_mla(pool: Any, at: At) -> Iterator[State]:
    """Rows of latent and rope, the same on every rank."""
    sizes = {"latent": pool.kv_lora_rank, "rope": pool.qk_rope_head_dim}
    form = partial(formats.latent_rows, **sizes, dtype=dtype_name(pool.dtype))
    if pool.dsa_kv_cache_store_fp8:
        form = partial(formats.rows, row=fp8_latent_row())
    yield from at.tensors((formats.paged(each, pool.page_size) for each in pool.kv_buffer), form)


def read_index_keys(pool: Any, at: At, page: int) -> Iterator[State]:
    """Pages of index keys in fp8, then of their scales; layers that reuse another's top-k have
    none.
    """
    form = partial(formats.index_keys, dim=pool.index_head_dim, dtype="e4m3", scale="float32")
    held = {n: each for n, each in zip(at.layers, pool.index_k_with_scale_buffer) if len(each)}
    views = (each.view(len(each), 1, page, -1) for each in held.values())
    yield from at._replace(layers=[*held]).tensors(views, form)


def read_dsa(pool: Any, at: At) -> Iterator[State]:
    """Rows, and index keys."""
    yield from read_mla(pool, at)
    if pool.index_kpool > 1 or torch.version.hip:
        raise UnknownFormat(
            f"index keys of {pool.index_kpool} tokens, and those of ROCm, are not known. Use a "
            f"model with a key a token on another device, or {HERE}."
        )
    yield from read_index_keys(pool, at, pool.page_size)


def read_npu_mla(pool: Any, at: At) -> Iterator[State]:
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
    indexed = at._replace(layers=[at.layers[layer - pool.start_layer] for layer in slots])
    for role, where, stacked, kind in (
        ("latent", at, pool.k_buffer, dtype),
        ("rope", at, pool.v_buffer, dtype),
        ("index_key", indexed, pool.index_k_buffer, dtype),
        ("index_key.scale", indexed, pool.index_k_scale_buffer, "float32"),
    ):
        if stacked is None or not stacked.numel():
            continue
        row: Template = fp8_latent_row()
        if role != "latent" or not pool.dsa_kv_cache_store_fp8:
            row = Cell(role, stacked.shape[-1], kind)
        views = (formats.paged(each, page) for each in stacked)
        yield from where.tensors(views, partial(formats.rows, row=row))


def read_swa(pool: Any, at: At) -> Iterator[State]:
    """A pool of layers that see every token, and one of those that see a window."""
    if at.ranks.window is None:
        raise UnknownFormat("sliding_window_size is None. Pass that of the scheduler.")
    window = Space("swa", entries_per_item=pool.page_size, window=at.ranks.window)
    for inside, slides in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
        held = {n: layer for layer, (n, swa) in pool.layers_mapping.items() if swa == slides}
        where = at._replace(layers=[held[n] for n in sorted(held)])
        if slides:
            where = where._replace(space=window, prefix="swa.")
        if held:
            yield from read(inside, where)


def read_hybrid(pool: Any, at: At) -> Iterator[State]:
    """A pool of the layers of attention, and the slots of those of linear attention."""
    layers = [*pool.full_attention_layer_id_mapping]
    yield from read(pool.full_kv_pool, at._replace(layers=layers))
    yield from read(pool.mamba_pool, at)


def read_mamba(pool: Any, at: At) -> Iterator[State]:
    """A slot a request: the conv state, `[channel, tap]` or `[tap, channel]`, and the temporal."""
    cache, ranks = pool.mamba_cache, at.ranks
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
    where = at._replace(layers=pool.mamba_layer_ids, space=Space("state", "slot"))
    shard = {"rank": ranks.tp_rank, "ranks": ranks.tp_size, "groups": ranks.groups}
    key_first = pool.device == "cpu"  # its kernels write [head, key, value]
    for tensors, form in tensor_states(kind, conv, temporal, **shard, key_first=key_first):
        yield from where.tensors(tensors, form)


def read_dsv4(pool: Any, at: At) -> Iterator[State]:
    """Latents of the window; on layers that compress, latents of 4 or 128 tokens (of 4 with index
    keys), and the tokens that are not yet compressed: in a ring for each page of the window (4), or
    for each request (128).
    """
    known = {
        "kv_layout": str(getattr(pool.kv_layout, "value", pool.kv_layout)) == "v4",
        "uniform_fp8": not pool.uniform_fp8,
        **{name: getattr(pool, name) is None for name in DSV4_UNUSED},
        "online": not any(ring and ring.online for ring in pool.compress_state_pools),
        "compression_ratios": set(pool.compression_ratios) <= {0, 4, 128},
        "index_pools": not any(keys.use_fp4_indexer for keys in pool.index_pools.values()),
        "c4_kv_pool": "HiSparse" not in type(pool.kv_pools.get(4)).__name__,
    }
    if not all(known.values()):
        wrong = ", ".join(name for name, fits in known.items() if not fits)
        raise UnknownFormat(
            f"{wrong}: known are paged latents of DeepSeek-V4 in fp8, compressed 4 and 128 to one, "
            f"their index keys in fp8, and rings of tokens. Use those, or {HERE}."
        )
    ratios = {n: each.compress_ratio for n, each in enumerate(pool.layer_mapping) if each}
    page, window = pool.swa_kv_pool.page_size, pool.sliding_window - 1
    space = Space("swa", entries_per_item=page, window=window)
    here = at._replace(layers=[*ratios], space=space, prefix="swa.")
    yield from here.tensors(pool.swa_kv_pool.kv_buffer, partial(formats.v4_latents, entries=page))
    for ratio in sorted({*ratios.values()} - {0}):
        entries, layers = pool.page_size // ratio, [n for n in ratios if ratios[n] == ratio]
        space = Space(f"c{ratio}", entries_per_item=entries, tokens_per_entry=ratio, ids="kv")
        here = at._replace(layers=layers, space=space, prefix=f"c{ratio}.")
        latents = partial(formats.v4_latents, entries=entries)
        yield from here.tensors(pool.kv_pools[ratio].kv_buffer, latents)
        if ratio in pool.index_pools:
            yield from read_index_keys(pool.index_pools[ratio], here, entries)
        for role, rings in (
            ("state", pool.compress_state_pools),
            ("index_state", pool.indexer_compress_state_pools),
        ):
            for layer in layers:
                if rings[layer] is not None:
                    yield from read_ring(rings[layer], here._replace(layers=[layer]), role, ratio)


def read_ring(ring: Any, at: At, role: str, ratio: int) -> Iterator[State]:
    """A layer's tokens that are not yet compressed. To 4: those of the open window and the one
    before it, in a ring of each page of the sliding window. To 128: those of the open window, in a
    ring of each request.
    """
    rows, size = ring.kv_score_buffer.kv_score, ring.ring_size
    home = Space("c128.ring", "ring", size, window=0, window_step=ratio)
    if ratio == 4:
        page = ring.swa_page_size
        home = Space("c4.ring", entries_per_item=page, window=4, window_step=4, ring=size)
    row = Cell(role, rows.shape[-1], dtype_name(rows.dtype))
    views = [formats.paged(rows, size)]
    yield from at._replace(space=home).tensors(views, partial(formats.rows, row=row))


POOLS: Mapping[str, Reader] = {
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


def reader(kind: type) -> Reader:
    """How pools of a class are read. Raises UnknownFormat, with what is known."""
    for base in kind.__mro__:
        if base.__name__ in POOLS:
            return POOLS[base.__name__]
        if any(name in vars(base) for name in MAKES):
            break
    raise UnknownFormat(f"not known (known: {', '.join(POOLS)}). Use another pool, or {HERE}.")


def read(pool: Any, at: At) -> Iterator[State]:
    """The states of a pool."""
    name = type(pool).__name__
    with naming(name):
        yield from reader(type(pool))(pool, at._replace(name=f"{at.name}: {name}"))


def read_pool(pool: Any, ranks: Ranks, owner: str = "target") -> list[State]:
    """The states of a whole pool. Layers of a draft are numbered from 0."""
    first, count = getattr(pool, "start_layer", 0), getattr(pool, "layer_num", 0)
    space = Space("kv", entries_per_item=getattr(pool, "page_size", 1))
    with naming(owner):
        found = [*read(pool, At(ranks, owner, range(first, first + count), space, name=owner))]
    if owner == "target":
        return found
    layers = sorted({layer.number for _, layer in found})
    return [(where, replace(layer, number=layers.index(layer.number))) for where, layer in found]
