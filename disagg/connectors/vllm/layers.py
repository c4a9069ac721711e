"""What vLLM's layers keep: the table of its backends, and how its modules and specs are read.

vLLM registers a layer of attention as a view `[block, head, state, content]` in any physical order,
and a layer of linear attention as bytes `[block, 1, 1, content]`. What a kernel writes there is in
no attribute of vLLM's: `ATTENTION` says it, as read in the kernels of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearKind, LinearShard, states
from disagg.connectors.tensors import (
    LayerTensor,
    TensorPart,
    UnknownFormat,
    layer_number,
    naming,
)
from kvpool.item import Cell, Seq
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import Heads, fp8_latent_row, index_key_page, latent_row

Parts = list[TensorPart]
HERE = "add it to disagg/connectors/vllm/layers.py"
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


def platform_of_process() -> Platform:
    """That of the vLLM in this process."""
    import vllm
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform
    from vllm.utils import deep_gemm

    exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)  # 0.33, on some GPUs
    return Platform(
        fp8=str(current_platform.fp8_dtype()).removeprefix("torch."),
        index_scale="float8_e8m0fnu" if exponents is not None and exponents() else "float32",
        dim_first=bool(is_conv_state_dim_first()),
        # ops/cpu/gdn_attention.py takes a view of the other shape
        key_first=current_platform.is_cpu(),
        version=vllm.__version__,
    )


@dataclass(frozen=True, kw_only=True)
class RegisteredLayer:
    """A layer as vLLM has registered it, `name` its name there."""

    config: Any
    name: str
    module: Any
    spec: Any
    view: torch.Tensor
    platform: Platform

    @property
    def owner(self) -> str:
        """A draft's layers are marked by vLLM, named so, or numbered after the target's; a group of
        EAGLE's may hold the target's layers too.
        """
        marks = ((self.module, "is_draft_layer"), (self.spec, "is_draft"))
        marked = any(getattr(part, flag, False) for part, flag in marks)
        later = layer_number(self.name) >= self.config.model_config.get_total_num_hidden_layers()
        return "draft" if marked or later or self.name.startswith("draft_model.") else "target"

    @property
    def model(self) -> Any:
        """The configuration of its model."""
        speculative = self.config.speculative_config if self.owner == "draft" else None
        return getattr(speculative, "draft_model_config", None) or self.config.model_config

    @property
    def is_linear(self) -> bool:
        """Whether it keeps states of linear attention."""
        return type(self.spec).__name__ == "MambaSpec"

    @property
    def backend(self) -> str:
        """vLLM's name of what reads and writes it."""
        if self.is_linear:
            return str(self.spec.mamba_type.name)
        return str(self.module.get_attn_backend().get_name())

    @property
    def element(self) -> str:
        """The dtype of what the kernel writes. Raises UnknownFormat where it is scaled."""
        if self.spec.kv_quant_mode.name == "FP8_PER_TENSOR":
            key, value = (getattr(self.module, f"_{role}_scale_float", 1.0) for role in "kv")
            formats.check_unscaled(key, value)
        names = {
            **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_per_token_head"), self.platform.fp8),
            "fp8_e5m2": "float8_e5m2",
            "int8_per_token_head": "int8",
        }
        cache, dtype = getattr(self.module, "kv_cache_dtype", "auto"), self.view.dtype
        floats = cache in FLOATS and dtype.is_floating_point and dtype.itemsize > 1
        if not floats and (cache not in names or dtype.itemsize > 1):
            raise UnknownFormat(
                f"cache dtype {cache} in a tensor of {dtype} is not known (known: "
                f"{', '.join((*FLOATS, *names))}). Use --kv-cache-dtype auto."
            )
        return dtype_name(dtype) if floats else names[cache]

    @property
    def heads(self) -> Heads:
        """Its KV heads on this rank."""
        parallel, total = self.config.parallel_config, self.model.get_total_num_kv_heads()
        ranks = parallel.tensor_parallel_size
        return formats.head_shard(self.spec.num_kv_heads, total, parallel.rank % ranks, ranks)

    def packing(self, *words: str) -> str:
        """The name of an inside that only this version's kernel knows."""
        sizes = f"{self.spec.head_size}+{self.spec.head_size_v}"
        return " ".join(("vllm", self.platform.version, self.backend, *words, sizes))


def read_layer(layer: RegisteredLayer) -> LayerTensor:
    """Raises UnknownFormat, which names the layer and its backend."""
    number = layer_number(layer.name)
    name = f"{layer.name} ({layer.owner} layer {number}), {layer.backend}"
    with naming(name):
        if layer.is_linear:
            view, parts = layer.view, read_linear(layer)
        else:
            view, parts = read_attention(layer)
    # where all groups are made one, their spec has the window of any layer
    window = getattr(layer.module, "sliding_window", None)
    slides = window or type(layer.spec).__name__.startswith("Sliding")
    return LayerTensor(
        name=name,
        number=number,
        view=view,
        parts=parts,
        owner=layer.owner,
        prefix="swa." if slides else "",
    )


def read_linear(layer: RegisteredLayer) -> Parts:
    """The slots of a layer of linear attention (`MambaBase.bind_kv_cache`)."""
    spec, parallel = layer.spec, layer.config.parallel_config
    if layer.backend not in LINEAR or len(spec.shapes) != 2:
        raise UnknownFormat(
            f"{len(spec.shapes)} states are not known (known: the conv state and the temporal "
            f"state of {', '.join(LINEAR)}). Turn off what adds states (ReplaySSM), or {HERE}."
        )
    ranks = 1 if getattr(spec, "tp_replicated", False) else parallel.tensor_parallel_size
    shard = LinearShard(
        rank=parallel.rank % ranks,
        ranks=ranks,
        groups=getattr(getattr(layer.module, "norm", None), "n_groups", 0),
        spare=0 if layer.backend == "MAMBA1" else layer.config.num_speculative_tokens,
        dim_first=layer.platform.dim_first,
        key_first=layer.platform.key_first,
    )
    dtypes = dtype_name(spec.dtypes[0]), dtype_name(spec.dtypes[1])
    parts = states(LINEAR[layer.backend], spec.shapes[0], spec.shapes[1], dtypes, shard)
    return [formats.items(Seq(*parts))]


def read_attention(layer: RegisteredLayer) -> tuple[torch.Tensor, Parts]:
    """What a layer of attention keeps (`do_kv_cache_update` of its backend), and in which view."""
    backend, mode = layer.backend, layer.spec.kv_quant_mode.name
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
    if mode in OPAQUE:
        return formats.whole_items(layer.view, layer.packing(mode), layer.heads)
    return layer.view, ATTENTION[backend](layer)


def index_keys(layer: RegisteredLayer) -> Parts:
    """Index keys of sparse attention, then their scales."""
    if getattr(layer.module, "uses_shuffled_layout", False):
        raise UnknownFormat("shuffled index keys are not known. Use a platform without them.")
    dim, platform = layer.model.hf_text_config.index_head_dim, layer.platform
    page = index_key_page(layer.view.shape[2], dim, dtype=platform.fp8, scale=platform.index_scale)
    return [formats.items(page)]


def latent_rows(layer: RegisteredLayer) -> Parts:
    """Rows of latent and rope."""
    if getattr(layer.module, "kv_cache_dtype", "auto") == "fp8_ds_mla":
        return [formats.rows(fp8_latent_row())]
    config = layer.model.hf_text_config
    row = latent_row(config.kv_lora_rank, config.qk_rope_head_dim, layer.element)
    return [formats.rows(row)]


def planes(layer: RegisteredLayer) -> Parts:
    """A plane of K, and one of V."""
    return formats.planes(layer.spec.head_size, layer.element, layer.heads)


def keys_and_values(layer: RegisteredLayer) -> Parts:
    """K and V side by side, a token and head; scaled so in some modes."""
    key, value = layer.spec.head_size, layer.spec.head_size_v
    with_scales = layer.spec.kv_quant_mode.name.endswith("TOKEN_HEAD")
    row = formats.key_value_row(key, value, layer.element, with_scales=with_scales)
    return [formats.head_rows(row, layer.heads)]


def transposed_keys(layer: RegisteredLayer) -> Parts:
    """On a CPU: K by dim, V by token, or as an instruction set packs them."""
    key, value, tokens = layer.spec.head_size, layer.spec.head_size_v, layer.view.shape[2]
    dtype, isa = layer.element, getattr(layer.module, "isa", "")
    if isa in ("vec", "vec16"):  # csrc/cpu/cpu_attn_vec.hpp, which vec16 inherits from
        item = formats.transposed_keys(tokens, key, value, dtype)
        return [formats.head_items(item, layer.heads)]
    if isa in ("", "rvv") or (isa, dtype) == ("neon", "bfloat16"):
        raise UnknownFormat(
            f"how isa {isa or 'unknown'} packs {dtype} is decided where vLLM is built. Use --dtype "
            "float32 (neon), or hosts of another architecture."
        )
    halves = Seq(Cell("k", key * tokens, dtype), Cell("v", value * tokens, dtype))
    return [formats.head_items(halves, layer.heads, layer.packing(isa, dtype))]


ATTENTION: Mapping[str, Callable[[RegisteredLayer], Parts]] = {
    backend: form
    for form, backends in {
        keys_and_values: (
            *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"),
            *("TRITON_ATTN_DIFFKV", "TRITON_FLASH_ATTN", "TRITON_FLASHINFER", "HPC_ATTN"),
        ),
        latent_rows: (
            *("CPU_MLA", "AMX_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "CUTLASS_MLA"),
            *("FLASH_ATTN_MLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"),
            *("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"),
        ),
        planes: ("B12X",),
        transposed_keys: ("CPU_ATTN",),
        index_keys: ("DEEPSEEK_V32_INDEXER",),
    }.items()
    for backend in backends
}
"""What a page holds, by the name of the attention backend."""
