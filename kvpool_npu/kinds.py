"""Kinds of state for Ascend's attention operators: one tensor per role.

Roles, axes and dtypes are those of kvpool.layout.formats, so that GPU and NPU pools exchange state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvpool.layout.formats import MLA, At, BufferSpec, IndexKey, LinearState, scaled
from kvpool.layout.template import Cell, Repeat


@dataclass(frozen=True, slots=True)
class NPUMLA(MLA):
    """Multi-head latent attention, latent and rope in two tensors: `[item, entry, 512]` and
    `[.., 64]`.

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
