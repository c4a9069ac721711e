"""Multi-head and grouped-query attention: K and V apart, each `[page, entry, head, dim]`."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import Unpack

from kvpool.layout.formats.attention import Order
from kvpool.pools.base import Common
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, At, Kind


class MHAPool(UnionPool):
    """`num_kv_heads` is that of the model; this rank holds its shard of them.

    `order`: `nhd` stores the heads of a token together, `hnd` the tokens of a head. Packings: `fp8`
    (a float32 scale per token and head) and `mxfp8` (a ue8m0 scale per 32 elements).
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

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """All K, then all V."""
        yield self.attention, self.at()
