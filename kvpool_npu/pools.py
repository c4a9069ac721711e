"""Pools in the layout of engines on Ascend, and their kinds of state: one tensor per role, stacked
over layers. Roles, axes and dtypes are those of GPU pools, so that both exchange state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from kvpool.layout.formats import MHA, MLA, At, BufferSpec, IndexKey, Kind, LinearState, scaled
from kvpool.layout.template import Cell, Repeat
from kvpool.pools.base import Common
from kvpool.pools.states import UnionPool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NPUMLA(MLA):
    """Multi-head latent attention, latent and rope apart: `[item, entry, 512]` and `[.., 64]`.

    Source: SGLang's `NPUMLATokenToKVPool` (hardware_backend/npu/memory_pool_npu.py), which has an
    axis of one head before the last; vllm-ascend's caches too.
    """

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """The latents, then the rope keys."""
        at.takes(self)
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        for role, size in zip(self.inputs, sizes):
            yield at.buffer(role, Repeat("entry", at.entries, Cell(role, size, at.packing)))


@dataclass(frozen=True, slots=True)
class NPUIndexKey(IndexKey):
    """Keys of a sparse-attention indexer and their scales in two tensors: `[item, entry, 128]` and
    `[.., 1]`.

    Packings: any float dtype, without scales; `fp8`, e4m3 and a float32 scale per token (SGLang's
    `enable_npu_quant_lightning_indexer`; vllm-ascend's indexer with `fp8`, on A5); `int8` and a
    float16 scale per token (vllm-ascend's "C8" indexer on A2 and A3, `c8_k_cache_dtype` and
    `c8_k_scale_cache_dtype` of its MLA cache specification).
    """

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """The keys, then the scales if they have any."""
        if at.packing == "int8":
            cells = [*scaled("index_key", self.head_dim, dtype="int8", scale="f16")]
        elif at.takes(self, "fp8"):
            cells = [*scaled("index_key", self.head_dim)]
        else:
            cells = [Cell("index_key", self.head_dim, at.packing)]
        for cell in cells:
            yield at.buffer(cell.role, Repeat("entry", at.entries, cell))


def npu_order(linear: LinearState) -> LinearState:
    """The same state with its convolution in the order of NPU operators: `[tap, channels]`."""
    return replace(linear, conv_layout="taps_first")


class NPUMHAPool(UnionPool):
    """`k` and `v` `[layer, item, entry, head, dim]`. `num_kv_heads` counts the model's heads; the
    pool holds this rank's shard.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.attention = MHA(num_kv_heads, head_dim, v_head_dim)
        common.setdefault("placement", "stack")
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """All K, then all V."""
        yield self.attention, self.at()


class NPUMLAPool(UnionPool):
    """`latent` and `rope`, and with `index_head_dim` the keys of a sparse indexer on `index_layers`
    (default: all), each `[layer, item, entry, dim]`: 2 kinds of buffers, or 3, or 4 with scales.

    `index_packing`: a float dtype (default: the pool's), `fp8` or `int8` (see NPUIndexKey).
    """

    def __init__(
        self,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: torch.dtype | str | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.attention = NPUMLA(kv_lora_rank, qk_rope_head_dim)
        self.index = None if index_head_dim is None else NPUIndexKey(index_head_dim)
        self.index_layers = None if index_layers is None else tuple(index_layers)
        self.index_packing = index_packing
        common.setdefault("placement", "stack")
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """Latents and rope keys, then index keys, all listed with the main cache."""
        yield self.attention, self.at()
        if self.index is not None:
            packing = self.index_packing or self.packing
            yield self.index, self.at(self.index_layers, packing=packing)
