"""What SGLang's memory pools keep: the table of its pool classes, read by their public attributes.

A pool is recognised by the names of its class and of those that it inherits from; nothing of
SGLang is imported. Page 0 and slot 0 are padding. Read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from disagg.connectors import formats
from disagg.connectors.tensors import Part, UnknownFormat, naming
from kvpool.describe import Described, describe_items
from kvpool.item import Cell, prefixed
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.dtypes import dtype_name

HERE = "add it to disagg/connectors/sglang/pools.py"


class Pools(NamedTuple):
    """A rank's pools: `token_to_kv_pool` of the target and of the draft model, and
    `req_to_token_pool`, which holds the states of linear attention.
    """

    target: Any
    draft: Any | None = None
    requests: Any | None = None


class Ranks(NamedTuple):
    """This rank's place in attention's tensor parallelism, the KV heads of the model, and the
    tokens before a position that its window sees (the scheduler's `sliding_window_size`).
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 1
    window: int | None = None

    def heads(self, held: int) -> formats.Heads:
        """The first of `held` heads of this rank, and all of the model."""
        return formats.head_shard(held, self.total_kv_heads, self.tp_rank, self.tp_size)


class State(NamedTuple):
    """What a tensor keeps of a layer, in the items of `space`. `prefix` is put before roles."""

    layer: int
    space: Space
    part: Part
    prefix: str = ""

    def describe(self, owner: str) -> Described:
        """The tensor's buffer and regions."""
        tensor, dims, item, heads, packing = self.part
        return describe_items(
            tensor,
            dims,
            prefixed(item, self.prefix),
            layer=self.layer,
            space=self.space.name,
            owner=owner,
            shards={"head": heads} if "head" in dims else {},
            packing=packing,
        )


class At(NamedTuple):
    """Where a pool's states lie: the numbers of its layers, its space, and what precedes roles."""

    layers: Sequence[int]
    space: Space
    ranks: Ranks
    prefix: str = ""

    def states(self, number: int, *parts: Part) -> Iterator[State]:
        """`parts` of the pool's layer at index `number`."""
        for part in parts:
            yield State(self.layers[number], self.space, part, self.prefix)


def paged(tensor: torch.Tensor, page: int, *inner: int) -> torch.Tensor:
    """Rows of tokens, in any number of dims, as `[page, token, *inner]`."""
    rows = tensor.view(-1, *inner)
    pages = len(rows) // page
    return rows[: pages * page].view(pages, page, *inner)


def read_mha(pool: Any, at: At) -> Iterator[State]:
    """K and V apart, a page of either `[token, head, dim]` or `[head, token, dim]`."""
    if getattr(pool, "is_quantized_kv_cache", False):
        raise UnknownFormat(
            f"KV quantised by {type(pool.quant_method).__name__} is not known. Use "
            "--kv-cache-dtype auto or fp8_e4m3."
        )
    heads, dtype = at.ranks.heads(pool.head_num), dtype_name(pool.dtype)
    for number in range(pool.layer_num):
        for role, buffers, dim in (
            ("k", pool.k_buffer, pool.head_dim),
            ("v", pool.v_buffer, pool.v_head_dim),
        ):
            cell, buffer = Cell(role, dim, dtype), buffers[number]
            if pool.kv_cache_layout == "nhd":
                view = paged(buffer, pool.page_size, pool.head_num, dim)
                yield from at.states(number, Part(view, ("item", "entry", "head"), cell, heads))
            elif pool.kv_cache_layout == "hnd":
                yield from at.states(number, Part(buffer, ("item", "head", "entry"), cell, heads))
            elif pool.kv_cache_layout == "vectorized_5d":
                tile = buffer.shape[-1]
                whole = Cell(role, pool.page_size * dim, dtype)
                name = f"sglang vectorized_5d {role}, {pool.page_size} tokens of {dim} by {tile}"
                part = Part(buffer, ("item", "head"), whole, heads, name)
                yield from at.states(number, part)
            else:
                raise UnknownFormat(
                    f"kv_cache_layout {pool.kv_cache_layout!r} is not known (known: nhd, hnd, "
                    "vectorized_5d)."
                )


Reader = Callable[[Any, At], Iterator[State]]
POOLS: Mapping[str, Reader] = {
    "MHATokenToKVPool": read_mha,
    "NPUMHATokenToKVPool": read_mha,
}
"""How a pool is read, by the name of its class."""
WRITES = ("_create_buffers", "get_contiguous_buf_infos", "set_kv_buffer", "set_mla_kv_buffer")
"""A class that overrides one of these keeps something else than the one that it inherits from."""


def reader(pool: Any) -> Reader:
    """How `pool` is read. Raises UnknownFormat, which names its class, and what is known."""
    for base in type(pool).__mro__:
        if base.__name__ in POOLS:
            return POOLS[base.__name__]
        if any(name in vars(base) for name in WRITES):
            break
    raise UnknownFormat(
        f"a {type(pool).__name__} is not known (known: {', '.join(POOLS)}). Use another pool, or "
        f"{HERE}."
    )


def read_pool(pool: Any, ranks: Ranks, owner: str) -> Iterator[State]:
    """The states of a whole pool. Layers of a draft are numbered from 0."""
    first = pool.start_layer if owner == "target" else 0
    layers = range(first, first + pool.layer_num)
    with naming(f"{owner} {type(pool).__name__}"):
        yield from reader(pool)(pool, At(layers, pages(pool), ranks))


def pages(pool: Any) -> Space:
    """The space of a pool's pages."""
    return Space("kv", entries_per_item=pool.page_size)


IDS = {"swa": "swa"}
"""The space whose ids a component of SGLang's state gives; others give those of the pages."""


@dataclass(frozen=True)
class EngineLayout:
    """What a rank's pools mean, and how SGLang's indices address them. `state_types`: the
    components of `KVArgs.state_types`, by value.
    """

    layout: PoolLayout
    state_types: tuple[str, ...] = ()

    def address(
        self,
        tokens: int,
        kv_indices: Sequence[int] | np.ndarray[Any, Any],
        state_indices: Sequence[Any] | None = None,
        first_page: int = 0,
    ) -> RequestAddress:
        """The block table of a request's first `tokens` positions: `kv_indices` are its pages from
        number `first_page` on, `state_indices` are parallel to `state_types` (None: the block table
        has pages only, as that of a chunk that is not the last).
        """
        spaces = self.layout.space_by_name
        spans = {"kv": Span(np.asarray(kv_indices), first_page)}
        for kind, given in zip(self.state_types, state_indices or ()):
            name = IDS.get(kind, "")
            if name in spaces and given is not None:
                ids = np.asarray(given).ravel()
                first = 0
                if spaces[name].kind == "paged":  # the pages that end with the last position's
                    first = -(-tokens // spaces[name].tokens_per_item) - ids.size
                spans[name] = Span(ids, first)
        return RequestAddress(tokens, spans)


def engine_layout(
    pools: Pools, state_types: Sequence[str], ranks: Ranks, total_layers: int, model: str = ""
) -> EngineLayout:
    """The layout of a rank's pools, of a model of `total_layers` layers.

    Raises UnknownFormat, which names the owner, the pool's class and what is known, and LayoutError
    where its tensors cannot be described.
    """
    states = [(state, "target") for state in read_pool(pools.target, ranks, "target")]
    if pools.draft is not None:
        states += [(state, "draft") for state in read_pool(pools.draft, ranks, "draft")]
    spaces: dict[str, Space] = {}
    parts: list[Described] = []
    for state, owner in states:
        known = spaces.setdefault(state.space.name, state.space)
        if known != state.space:
            raise UnknownFormat(
                f"{owner} layer {state.layer}: {state.space} is not that of other layers ({known})."
            )
        parts.append(state.describe(owner))
    layout = PoolLayout(
        tuple(buffer for part in parts for buffer in part.buffers),
        tuple(region for part in parts for region in part.regions),
        tuple(spaces.values()),
        total_layers,
        model=model,
    )
    return EngineLayout(layout, tuple(str(getattr(kind, "value", kind)) for kind in state_types))
