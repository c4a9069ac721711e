"""What vLLM's layers keep: the table of its backends, and how its modules and specs are read.

vLLM registers a layer of attention as a view `[block, head, state, content]` in any physical order,
and a layer of linear attention as bytes `[block, 1, 1, content]`. What a kernel writes there is in
no attribute of vLLM's: `ATTENTION` says it, as read in the kernels of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearKind, slots, states
from disagg.connectors.tensors import Format, Layer, UnknownFormat, layer_number, naming
from kvpool.item import Seq
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import fp8_latent_row

HERE = "add it to disagg/connectors/vllm/layers.py"
ATTENTION = {
    **dict.fromkeys(("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER"), "keys and values"),
    **dict.fromkeys(("FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"), "keys and values"),
    **dict.fromkeys(("TRITON_FLASH_ATTN", "TRITON_FLASHINFER", "HPC_ATTN"), "keys and values"),
    **dict.fromkeys(("CPU_MLA", "AMX_MLA", "FLASHMLA", "FLASHINFER_MLA"), "latent rows"),
    **dict.fromkeys(("TRITON_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA"), "latent rows"),
    **dict.fromkeys(("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"), "latent rows"),
    **dict.fromkeys(("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"), "latent rows"),
    "B12X": "planes",
    "CPU_ATTN": "transposed keys",
    "DEEPSEEK_V32_INDEXER": "index keys",
}
"""What a page holds, by the name of the attention backend."""
LINEAR: dict[str, LinearKind] = {"MAMBA1": "mamba1", "MAMBA2": "mamba2", "GDN_ATTN": "delta_net"}
"""What a slot holds, by the name of the kind of linear attention."""
OPAQUE = ("INT4_PER_TOKEN_HEAD",)
"""Quantisation modes whose pages move whole. Their kernels read nothing but pages and constants:
NVFP4 has scales of the whole tensor besides, and the device decides how TurboQuant packs.
"""
MODES = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", *OPAQUE)
"""Quantisation modes (`KVQuantMode`) that are known."""
FLOATS = ("auto", "float16", "half", "bfloat16", "float32", "float")


class Platform(NamedTuple):
    """What vLLM decides by its platform: the dtype that it calls fp8, the dtype of index keys'
    scales, whether conv states are `(dim, tap)` and states of delta nets `(head, key, value)`, and
    its version.
    """

    fp8: str = "float8_e4m3fn"
    index_scale: str = "float32"
    dim_first: bool = False
    key_first: bool = False
    version: str = ""


def platform() -> Platform:
    """That of the vLLM in this process."""
    import vllm
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform
    from vllm.utils import deep_gemm

    exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)  # 0.33, on some GPUs
    return Platform(
        str(current_platform.fp8_dtype()).removeprefix("torch."),
        "float8_e8m0fnu" if exponents is not None and exponents() else "float32",
        bool(is_conv_state_dim_first()),
        current_platform.is_cpu(),  # ops/cpu/gdn_attention.py takes a view of the other shape
        vllm.__version__,
    )


def read_layer(
    vllm_config: Any, name: str, module: Any, spec: Any, view: torch.Tensor, here: Platform
) -> Layer:
    """A layer from vLLM's module and spec. Raises UnknownFormat, which names it and its backend."""
    number, owner, model = owner_of(vllm_config, name, module, spec)
    linear = type(spec).__name__ == "MambaSpec"
    backend = spec.mamba_type.name if linear else module.get_attn_backend().get_name()
    named = f"{name} ({owner} layer {number}), {backend}"
    with naming(named):
        if linear:
            found = read_linear(vllm_config, module, spec, here)
        else:
            found = read_attention(vllm_config.parallel_config, model, module, spec, view, here)
    # where all groups are made one, their spec has the window of any layer
    slides = getattr(module, "sliding_window", None) or type(spec).__name__.startswith("Sliding")
    prefix = "swa." if slides else ""
    return Layer(named, number, view, found, owner, prefix)


def read_linear(vllm_config: Any, module: Any, spec: Any, here: Platform) -> Format:
    """The slots of a layer of linear attention (`MambaBase.bind_kv_cache`)."""
    kind, parallel = spec.mamba_type.name, vllm_config.parallel_config
    if kind not in LINEAR or len(spec.shapes) != 2:
        raise UnknownFormat(
            f"{len(spec.shapes)} states are not known (known: the conv state and the temporal "
            f"state of {', '.join(LINEAR)}). Turn off what adds states (ReplaySSM), or {HERE}."
        )
    ranks = 1 if getattr(spec, "tp_replicated", False) else parallel.tensor_parallel_size
    conv, temporal = spec.shapes
    parts = states(
        LINEAR[kind],
        conv,
        temporal,
        (dtype_name(spec.dtypes[0]), dtype_name(spec.dtypes[1])),
        rank=parallel.rank % ranks,
        ranks=ranks,
        groups=getattr(getattr(module, "norm", None), "n_groups", 0),
        spare=0 if kind == "MAMBA1" else vllm_config.num_speculative_tokens,
        dim_first=here.dim_first,
        key_first=here.key_first,
    )
    return partial(slots, item=Seq(*parts))


def read_attention(
    parallel: Any, model: Any, module: Any, spec: Any, view: torch.Tensor, here: Platform
) -> Format:
    """What a layer of attention keeps (`do_kv_cache_update` of its backend)."""
    backend, mode = module.get_attn_backend().get_name(), spec.kv_quant_mode.name
    cache, config = getattr(module, "kv_cache_dtype", "auto"), model.hf_text_config
    if backend not in ATTENTION:
        raise UnknownFormat(
            f"what it keeps is not known (known: {', '.join(sorted(ATTENTION))}). Choose one of "
            f"those by --attention-backend, or {HERE}."
        )
    if mode not in MODES or (mode.endswith("TOKEN_HEAD") and backend != "TRITON_ATTN"):
        raise UnknownFormat(
            f"pages of {mode} are not known (known: {', '.join(MODES)}; scales per token and head "
            "of TRITON_ATTN). Use --kv-cache-dtype auto."
        )
    if ATTENTION[backend] == "index keys":
        if getattr(module, "uses_shuffled_layout", False):
            raise UnknownFormat("shuffled index keys are not known. Use a platform without them.")
        scale = here.index_scale
        return partial(formats.index_keys, dim=config.index_head_dim, dtype=here.fp8, scale=scale)
    if cache == "fp8_ds_mla":
        return partial(formats.rows, row=fp8_latent_row())
    if mode == "FP8_PER_TENSOR":
        formats.check_unscaled(*(getattr(module, f"_{which}_scale_float", 1.0) for which in "kv"))
    if ATTENTION[backend] == "latent rows":
        sizes = {"latent": config.kv_lora_rank, "rope": config.qk_rope_head_dim}
        return partial(formats.latent_rows, **sizes, dtype=element(cache, view, here))
    key, value, isa = spec.head_size, spec.head_size_v, getattr(module, "isa", "")
    ranks = parallel.tensor_parallel_size
    heads = formats.head_shard(
        spec.num_kv_heads, model.get_total_num_kv_heads(), parallel.rank % ranks, ranks
    )
    said = f"vllm {here.version} {backend}", f"{key}+{value}"
    if mode in OPAQUE:
        return partial(formats.whole_items, packing=f"{said[0]} {mode} {said[1]}", heads=heads)
    kind = element(cache, view, here)
    if ATTENTION[backend] == "planes":
        return partial(formats.planes, dim=key, dtype=kind, heads=heads)
    numbers = {"key": key, "value": value, "dtype": kind, "heads": heads}
    if ATTENTION[backend] == "keys and values":
        return partial(formats.keys_and_values, **numbers, with_scales=mode.endswith("TOKEN_HEAD"))
    if isa in ("vec", "vec16"):  # csrc/cpu/cpu_attn_vec.hpp, which vec16 inherits from
        return partial(formats.transposed_keys, **numbers)
    if isa in ("", "rvv") or (isa, kind) == ("neon", "bfloat16"):
        raise UnknownFormat(
            f"how isa {isa or 'unknown'} packs {kind} is decided where vLLM is built. Use --dtype "
            "float32 (neon), or hosts of another architecture."
        )
    packing = f"{said[0]} {isa} {kind} {said[1]}"
    return partial(formats.transposed_keys, **numbers, packing=packing)


def element(cache: str, view: torch.Tensor, here: Platform) -> str:
    """The dtype of what the kernel writes, by vLLM's name of the cache dtype."""
    known = {
        **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_per_token_head"), here.fp8),
        "fp8_e5m2": "float8_e5m2",
        "int8_per_token_head": "int8",
    }
    held = view.dtype
    floats = cache in FLOATS and held.is_floating_point and held.itemsize > 1
    if not floats and (cache not in known or held.itemsize > 1):
        raise UnknownFormat(
            f"cache dtype {cache} in a tensor of {held} is not known (known: "
            f"{', '.join((*FLOATS, *known))}). Use --kv-cache-dtype auto."
        )
    return dtype_name(held) if floats else known[cache]


def owner_of(vllm_config: Any, name: str, module: Any, spec: Any) -> tuple[int, str, Any]:
    """Number, owner and model config of a layer. A draft's layers are marked by vLLM, named so, or
    numbered after the target's; a group of EAGLE's may hold the target's layers too.
    """
    target = vllm_config.model_config
    number = layer_number(name)
    draft = getattr(module, "is_draft_layer", False) or getattr(spec, "is_draft", False)
    named = name.startswith("draft_model.")
    if not draft and not named and number < target.get_total_num_hidden_layers():
        return number, "target", target
    speculative = vllm_config.speculative_config
    return number, "draft", getattr(speculative, "draft_model_config", None) or target
