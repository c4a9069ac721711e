"""Multi-head latent attention: one row per token, the latent and then the rope key."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import Unpack

from kvpool.pools.base import Common
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MLA, At, Kind


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

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """One row per token."""
        yield self.attention, self.at()
