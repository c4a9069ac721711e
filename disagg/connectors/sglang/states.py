"""What SGLang's memory pools keep: the table of its pool classes, read by their public attributes.

A pool is recognised by the names of its class and of those that it inherits from; nothing of
SGLang is imported. Page 0 and slot 0 are padding. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearKind, sections
from disagg.connectors.tensors import Part, UnknownFormat, naming
from kvpool.describe import Described, Section, describe, describe_items, describe_sections
from kvpool.item import Cell, Template, prefixed
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name

HERE = "add it to disagg/connectors/sglang/states.py"


class Ranks(NamedTuple):
    """What the pools of a rank do not say.

    `tp_rank`, `tp_size`: its place in attention's tensor parallelism. `total_kv_heads`: those of
    the model. `window`: the tokens before a position that its sliding window sees (the scheduler's
    `sliding_window_size`). `groups`: Mamba-2's B and C in the model.
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 1
    window: int | None = None
    groups: int = 0

    def heads(self, held: int) -> formats.Heads:
        """The first of `held` heads of this rank, and all of the model."""
        return formats.head_shard(held, self.total_kv_heads, self.tp_rank, self.tp_size)


class At(NamedTuple):
    """Where a pool's states lie: the numbers of its layers, the space of its pages, what precedes
    its roles, and whose they are.
    """

    ranks: Ranks
    owner: str
    layers: Sequence[int]
    space: Space
    prefix: str = ""

    def states(self, number: int, *parts: Part, space: Space | None = None) -> Iterator[State]:
        """`parts` of the pool's layer at index `number`, each in a buffer of its own."""
        home = space or self.space
        for tensor, dims, item, heads, packing in parts:
            yield (
                home,
                describe_items(
                    tensor,
                    dims,
                    prefixed(item, self.prefix),
                    layer=self.layers[number],
                    space=home.name,
                    owner=self.owner,
                    shards={"head": heads} if "head" in dims else {},
                    packing=packing,
                ),
            )


State = tuple[Space, Described]
Reader = Callable[[Any, At], Iterator[State]]


def paged(tensor: torch.Tensor, page: int, *inner: int) -> torch.Tensor:
    """Rows of tokens, in any number of dims, as `[page, token, *inner]`."""
    rows = tensor.view(-1, *inner)
    pages = len(rows) // page
    return rows[: pages * page].view(pages, page, *inner)


def read_mha(pool: Any, at: At) -> Iterator[State]:
    """K and V apart: a page of either is `[token, head, dim]` or `[head, token, dim]`."""
    if getattr(pool, "is_quantized_kv_cache", False):
        raise UnknownFormat(
            f"KV quantised by {type(pool.quant_method).__name__} is not known. Use "
            "--kv-cache-dtype auto or fp8_e4m3."
        )
    heads, dtype, page = at.ranks.heads(pool.head_num), dtype_name(pool.dtype), pool.page_size
    for number in range(pool.layer_num):
        for role, buffers, dim in (
            ("k", pool.k_buffer, pool.head_dim),
            ("v", pool.v_buffer, pool.v_head_dim),
        ):
            cell, buffer = Cell(role, dim, dtype), buffers[number]
            if pool.kv_cache_layout == "nhd":
                view = paged(buffer, page, pool.head_num, dim)
                part = Part(view, ("item", "entry", "head"), cell, heads)
            elif pool.kv_cache_layout == "hnd":
                part = Part(buffer, ("item", "head", "entry"), cell, heads)
            elif pool.kv_cache_layout == "vectorized_5d":  # dim and tokens are cut in tiles
                name = f"sglang vectorized_5d {role}, {page} x {dim} by {buffer.shape[-1]}"
                part = Part(buffer, ("item", "head"), Cell(role, page * dim, dtype), heads, name)
            else:
                raise UnknownFormat(
                    f"kv_cache_layout {pool.kv_cache_layout!r} is not known (known: nhd, hnd, "
                    "vectorized_5d)."
                )
            yield from at.states(number, part)


def read_mxfp8(pool: Any, at: At) -> Iterator[State]:
    """K and V, and a scale for 32 elements of each; in pages of 128, in the order of a kernel."""
    yield from read_mha(pool, at)
    heads, page = at.ranks.heads(pool.head_num), pool.page_size
    for number in range(pool.layer_num):
        for role, scales in (("k", pool.k_scale_buffer), ("v", pool.v_scale_buffer)):
            buffer, count = scales[number], scales[number].shape[-1]
            cell = Cell(f"{role}.scale", count, "ue8m0")
            if pool.mxfp8_sf_interleaved:
                name = f"sglang mxfp8 scales, {' x '.join(map(str, buffer.shape[2:]))}"
                whole = Cell(f"{role}.scale", page * count, "ue8m0")
                part = Part(buffer, ("item", "head"), whole, heads, name)
            else:
                view = paged(buffer, page, pool.head_num, count)
                part = Part(view, ("item", "entry", "head"), cell, heads)
            yield from at.states(number, part)


def read_mla(pool: Any, at: At) -> Iterator[State]:
    """Rows of latent and rope, the same on every rank."""
    for number, buffer in enumerate(pool.kv_buffer):
        view = paged(buffer, pool.page_size, 1, pool.kv_cache_dim).transpose(1, 2)
        if pool.dsa_kv_cache_store_fp8:
            parts = formats.rows(view, formats.FP8_LATENT_ROW)
        else:
            parts = formats.latent_rows(
                view,
                latent=pool.kv_lora_rank,
                rope=pool.qk_rope_head_dim,
                dtype=dtype_name(pool.dtype),
            )
        yield from at.states(number, *parts)


def read_dsa(pool: Any, at: At) -> Iterator[State]:
    """Rows, and index keys with their scales; layers that reuse another's top-k have none."""
    yield from read_mla(pool, at)
    if pool.index_kpool > 1 or torch.version.hip:
        raise UnknownFormat(
            f"index keys of {pool.index_kpool} tokens, and those of ROCm, are not known. Use a "
            f"model with a key a token on another device, or {HERE}."
        )
    for number, buffer in enumerate(pool.index_k_with_scale_buffer):
        if len(buffer):
            view = buffer.view(len(buffer), 1, pool.page_size, -1)
            keys = formats.index_keys(view, dim=pool.index_head_dim, dtype="e4m3", scale="float32")
            yield from at.states(number, *keys)


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
    for number in range(pool.layer_num):
        latent = paged(pool.k_buffer[number], page, pool.kv_cache_dim)
        held: list[tuple[torch.Tensor, Template]] = [(latent, formats.FP8_LATENT_ROW)]
        if not pool.dsa_kv_cache_store_fp8:
            rope = paged(pool.v_buffer[number], page, pool.kr_cache_dim)
            held = [
                (latent, Cell("latent", pool.kv_cache_dim, dtype)),
                (rope, Cell("rope", pool.kr_cache_dim, dtype)),
            ]
        slot = slots.get(pool.start_layer + number)
        if slot is not None:
            keys = paged(pool.index_k_buffer[slot], page, pool.index_head_dim)
            held.append((keys, Cell("index_key", pool.index_head_dim, dtype)))
            if pool.index_k_scale_buffer is not None:
                scales = paged(pool.index_k_scale_buffer[slot], page, 1)
                held.append((scales, Cell("index_key.scale", 1, "float32")))
        yield from at.states(number, *(Part(view, ("item", "entry"), cell) for view, cell in held))


def read_swa(pool: Any, at: At) -> Iterator[State]:
    """A pool of layers that see every token, and one of those that see a window."""
    if at.ranks.window is None:
        raise UnknownFormat("sliding_window_size is None. Pass that of the scheduler.")
    window = Space("swa", entries_per_item=pool.page_size, window=at.ranks.window)
    for inside, slides in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
        held = sorted(
            (n, layer) for layer, (n, swa) in pool.layers_mapping.items() if swa == slides
        )
        if held:
            where = at._replace(space=window, prefix="swa.") if slides else at
            yield from read(inside, where._replace(layers=[layer for _, layer in held]))


def read_hybrid(pool: Any, at: At) -> Iterator[State]:
    """A pool of the layers of attention, and the slots of those of linear attention."""
    layers = [*pool.full_attention_layer_id_mapping]
    yield from read(pool.full_kv_pool, at._replace(layers=layers))
    yield from read(pool.mamba_pool, at)


def read_mamba(pool: Any, at: At) -> Iterator[State]:
    """A slot a request: the conv state, `[channel, tap]` or `[tap, channel]`, and the temporal."""
    cache, ranks, space = pool.mamba_cache, at.ranks, Space("state", "slot")
    if len(cache.conv) != 1 or len(getattr(pool, "_slot_siblings", ())):
        raise UnknownFormat(
            f"{len(cache.conv)} conv states, and states beside them, are not known. Use another "
            f"model, or {HERE}."
        )
    (conv,), temporal = cache.conv, cache.temporal
    heads, value, key = temporal.shape[2:]
    kind: LinearKind = "delta_net" if pool.conv_shard_groups else "mamba2"
    if kind == "mamba2" and value == 1:
        kind = "mamba1"
    taps_first = getattr(pool, "conv_slice_axis", 0) == 1
    channels = conv.shape[3 if taps_first else 2]
    shape = (heads, value, key) if kind != "mamba1" else (heads, key)
    found = sections(kind, channels, shape, ranks.tp_rank, ranks.tp_size, ranks.groups)
    cuts = [
        Section(f"conv.{part.role}", {"head": part.heads, "dim": part.dim}, {"head": part[3:]})
        for part in found
    ]
    shards = {"head": (ranks.tp_rank * heads, ranks.tp_size * heads)}
    for number, layer in enumerate(pool.mamba_layer_ids):
        names = {"layer": layer, "space": space.name, "owner": at.owner}
        dims: tuple[str, ...] = ("item", "channel", "tap")
        if taps_first:
            dims = ("item", "tap", "channel")
        yield space, describe_sections(conv[number], dims, "channel", cuts, cell=None, **names)
        state, inner = temporal[number].flatten(2), ["state"]
        if kind == "delta_net":  # an axis says which of the two states it is
            state, inner = temporal[number], ["value", "key"]
            if pool.device == "cpu":  # its kernels write [head, key, value]
                state, inner = state.view(-1, heads, key, value), ["key", "value"]
        dims = ("item", "head", *inner)
        yield (
            space,
            describe(state, dims, role="temporal", cell=dims[-1], shards=shards, **names),
        )


def read_dsv4(pool: Any, at: At) -> Iterator[State]:
    """Latents of the window; on layers that compress, latents of 4 or 128 tokens (of 4 with index
    keys), and the tokens that are not yet compressed: in a ring for each page of the window (4), or
    for each request (128).
    """
    known = {
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
    if not all(known.values()):
        wrong = ", ".join(name for name, fits in known.items() if not fits)
        raise UnknownFormat(
            f"{wrong}: known are paged latents of DeepSeek-V4 in fp8, compressed 4 and 128 to one, "
            f"their index keys in fp8, and rings of tokens. Use those, or {HERE}."
        )
    held = [(layer, each) for layer, each in enumerate(pool.layer_mapping) if each is not None]
    here = at._replace(layers=range(len(pool.layer_mapping)))
    page, window = pool.swa_kv_pool.page_size, pool.sliding_window - 1
    slides = here._replace(space=Space("swa", entries_per_item=page, window=window), prefix="swa.")
    for number, (layer, each) in enumerate(held):
        yield from slides.states(
            layer, *formats.v4_latents(pool.swa_kv_pool.kv_buffer[number], page)
        )
        ratio, nth = each.compress_ratio, each.compress_layer_id
        if not ratio:
            continue
        entries = pool.page_size // ratio
        space = Space(f"c{ratio}", entries_per_item=entries, tokens_per_entry=ratio, ids="kv")
        there = here._replace(space=space, prefix=f"c{ratio}.")
        latents = pool.kv_pools[ratio].kv_buffer[nth]
        yield from there.states(layer, *formats.v4_latents(latents, entries))
        if ratio in pool.index_pools:
            inside = pool.index_pools[ratio]
            keys = inside.index_k_with_scale_buffer[nth]
            view = keys.view(len(keys), 1, entries, -1)
            yield from there.states(
                layer,
                *formats.index_keys(view, dim=inside.index_head_dim, dtype="e4m3", scale="float32"),
            )
        for role, rings in (
            ("state", pool.compress_state_pools),
            ("index_state", pool.indexer_compress_state_pools),
        ):
            if rings[layer] is not None:
                rows = rings[layer].kv_score_buffer.kv_score
                cell = Cell(role, rows.shape[-1], dtype_name(rows.dtype))
                home = ring_space(ratio, rings[layer].ring_size)
                view = paged(rows, home.entries_per_item, rows.shape[-1])
                yield from there.states(layer, Part(view, ("item", "entry"), cell), space=home)


def ring_space(ratio: int, ring: int) -> Space:
    """Tokens of the open window of 4 and the window before it: in a ring of each page of the
    sliding window, so 4 tokens of a ring are an item. Those of the open window of 128: a ring of
    each request.
    """
    if ratio == 4:
        return Space("c4.ring", entries_per_item=4, window=4, window_step=4, reserved=ring // 4)
    return Space("c128.ring", "ring", ring, window=0, window_step=ratio)


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
    with naming(type(pool).__name__):
        yield from reader(type(pool))(pool, at)


def read_pool(pool: Any, ranks: Ranks, owner: str = "target") -> list[State]:
    """The states of a whole pool. Layers of a draft are numbered from 0."""
    first, count = getattr(pool, "start_layer", 0), getattr(pool, "layer_num", 0)
    space = Space("kv", entries_per_item=getattr(pool, "page_size", 1))
    with naming(owner):
        found = [*read(pool, At(ranks, owner, range(first, first + count), space))]
    if owner == "target":
        return found
    layers = sorted({region.layer for _, seen in found for region in seen.regions})
    return [
        (
            where,
            Described(
                seen.buffers,
                tuple(replace(r, layer=layers.index(r.layer)) for r in seen.regions),
            ),
        )
        for where, seen in found
    ]
