"""Pools of one family each: they say which states they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from typing_extensions import Unpack

from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import MHA, MLA, At, IndexKey, Kind, LinearState, Order
from kvpool.pools.access import DTypeLike
from kvpool.pools.base import Common
from kvpool.pools.states import UnionPool


class MHAPool(UnionPool):
    """Multi-head and grouped-query attention: K and V apart, each `[page, entry, head, dim]`.

    `num_kv_heads` is that of the model; this rank holds its shard of them. `order`: `nhd` stores
    the heads of a token together, `hnd` the tokens of a head. Packings: `fp8` (a float32 scale per
    token and head) and `mxfp8` (a ue8m0 scale per 32 elements).
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        order: Order = "nhd",
        **common: Unpack[Common],
    ) -> None:
        self.attention = MHA(num_kv_heads, head_dim, v_head_dim, order)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """All K, then all V."""
        yield self.attention, self.at()


class MLAPool(UnionPool):
    """Rows of `kv_lora_rank` latent and `qk_rope_head_dim` rope elements (DeepSeek-V3: 512 + 64).

    Rows have no head axis: every rank of a tensor-parallel group holds them whole. Packing `fp8`:
    rows of 656 bytes.
    """

    def __init__(
        self, *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, **common: Unpack[Common]
    ) -> None:
        self.attention = MLA(kv_lora_rank, qk_rope_head_dim)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """One row per token."""
        yield self.attention, self.at()


class NSAPool(UnionPool):
    """An MLA pool with keys of `index_head_dim` elements on `index_layers` (default: all).

    `index_packing`: `fp8` (132 bytes for a key of 128) or a float dtype, independent of `packing`.
    """

    def __init__(
        self,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int = 128,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        **common: Unpack[Common],
    ) -> None:
        self.attention = MLA(kv_lora_rank, qk_rope_head_dim)
        self.index = IndexKey(index_head_dim)
        self.index_layers = None if index_layers is None else tuple(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """One row and one key per token."""
        yield self.attention, self.at()
        yield self.place(self.index, self.index_layers)


class SWAPool(UnionPool):
    """`window_layers` hold the last `window` tokens in a space of their own, other layers every
    token. `window_layers` are those of the whole model; this rank holds `layers` of them.

    `full` and `swa` are the attention of either kind of layer (`swa` default: as `full`).
    """

    def __init__(
        self,
        *,
        full: MHA | MLA,
        window_layers: Iterable[int],
        window: int,
        swa: MHA | MLA | None = None,
        window_page_size: int = 0,
        **common: Unpack[Common],
    ) -> None:
        self.full, self.swa, self.window = full, swa or full, window
        self.window_layers, self.windows = frozenset(window_layers), {window: "swa"}
        self.window_page_size = window_page_size or common.get("page_size", 0)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """The full layers, then the window layers."""
        yield self.full, self.at(set(self.layers) - self.window_layers)
        yield self.place(self.swa, self.window_layers, window=self.window)


class HybridLinearPool(UnionPool):
    """`linear_layers` hold the state `linear` per request, `full_layers` (default: the others) the
    attention `full`, and with `index` the keys of a sparse indexer (on `index_layers`, default: all
    of them). A layer may hold both. Without `full` the pool has slots only.

    `conv_dtype` (default: that of the pool) and `temporal_dtype` (default: that of `linear`,
    float32) are those of the states.
    """

    def __init__(
        self,
        *,
        full: MHA | MLA | None = None,
        full_layers: Iterable[int] | None = None,
        linear: LinearState,
        linear_layers: Iterable[int],
        index: IndexKey | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        conv_dtype: DTypeLike | None = None,
        temporal_dtype: DTypeLike | None = None,
        **common: Unpack[Common],
    ) -> None:
        if temporal_dtype is not None:
            linear = replace(linear, temporal_dtype=dtype_name(temporal_dtype))
        self.full, self.linear, self.index = full, linear, index
        self.linear_layers, self.conv_dtype = frozenset(linear_layers), conv_dtype
        self.full_layers = None if full_layers is None else frozenset(full_layers)
        self.index_layers = None if index_layers is None else frozenset(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """The full layers and their index keys, then the linear layers."""
        full = self.full_layers
        if full is None:
            full = frozenset(self.layers) - self.linear_layers
        if self.full is not None:
            yield self.full, self.at(full)
        if self.index is not None:
            indexed = full if self.index_layers is None else full & self.index_layers
            yield self.place(self.index, indexed)
        yield self.place(self.linear, self.linear_layers)
