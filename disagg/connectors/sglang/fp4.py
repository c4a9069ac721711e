"""What SGLang's pools of FP4 keep: codes, and a scale for 16 elements, in tensors of their own.
Read in SGLang 0.5.23 (`fp4_kv_cache_quant_method.py`, `kvfp4_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from disagg.connectors.tensors import UnknownFormat
from kvpool.item import Cell, Seq
from kvpool.layout.formats import fp4_cells

PLAIN = "cpu_fp8_e4m3"
"""The quantisation of pools without scales."""
FP4_SCALES = {"nvfp4": "e4m3", "fp4_mx_block16": "ue8m0"}
"""The dtype of scales, by the name of the quantisation."""


def is_fp4(pool: Any) -> bool:
    return bool(pool.is_quantized_kv_cache) and pool.quant_method.name != PLAIN


def head_planes(pool: Any) -> Iterator[tuple[Sequence[torch.Tensor], Cell]]:
    """Tensors `[token, head, content]` of K, of its scales, of V and of its scales, and the cell of
    a token and head. The class MHATokenToKVPoolFP4 has one quantisation, and names none.
    """
    method = pool.quant_method.name if is_fp4(pool) else "fp4_mx_block16"
    if method not in FP4_SCALES or getattr(pool, "native_k_scale_buffer", None):
        raise UnknownFormat(
            f"KV quantised by {method}, with scales in the order of TRT-LLM's kernels or otherwise "
            f"than {', '.join((PLAIN, *FP4_SCALES))}, is not known, nor does SGLang hand it over. "
            "Use --kv-cache-dtype auto, or for nvfp4 --attention-backend flashinfer."
        )
    planes = ("k", pool.k_buffer, pool.k_scale_buffer), ("v", pool.v_buffer, pool.v_scale_buffer)
    for role, codes, scales in planes:
        cells = fp4_cells(role, 2 * codes[0].shape[-1], FP4_SCALES[method])
        yield from zip((codes, [t.view(len(t), pool.head_num, -1) for t in scales]), cells)


def latent_rows(pool: Any) -> Iterator[tuple[Sequence[torch.Tensor], Seq]]:
    """Tensors `[token, ...]` of latent and rope, and of their scales, and a token's row."""
    sizes = ("latent", pool.kv_lora_rank), ("rope", pool.qk_rope_head_dim)
    cells = [fp4_cells(role, dim, FP4_SCALES["fp4_mx_block16"]) for role, dim in sizes]
    for tensors, row in zip((pool.kv_buffer, pool.kv_scale_buffer), zip(*cells)):
        yield tensors, Seq(*row)
