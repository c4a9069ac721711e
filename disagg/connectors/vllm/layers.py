"""What vLLM's layers keep: the table of its backends, and how its modules and specs are read.

vLLM registers a layer of attention as a view `[block, head, state, content]` in any physical order,
and a layer of linear attention as bytes `[block, 1, 1, content]`. What a kernel writes there is in
no attribute of vLLM's: `ATTENTION` says it, as read in the kernels of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from disagg.connectors.linear_states import LinearKind, LinearShard, states
from disagg.connectors.tensors import (
    LayerTensor,
    TensorPart,
    UnknownFormat,
    head_items,
    head_rows,
    head_shard,
    items,
    naming,
    rows,
)
from kvpool.item import Cell, Repeat, Seq, Template
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import Heads, fp8_latent_row, index_key_page, latent_row, scaled

Parts = list[TensorPart]
HERE = "add it to disagg/connectors/vllm/layers.py"
LINEAR: dict[str, LinearKind] = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "delta_net",
    "SHORT_CONV": "short_conv",
}
"""What a slot holds, by the name of the kind of linear attention."""
OPAQUE = "INT4_PER_TOKEN_HEAD"
"""The quantisation mode whose pages move whole. Its kernel reads nothing but pages and constants:
NVFP4 has scales of the whole tensor besides, and the device decides how TurboQuant packs.
"""
MODES = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", OPAQUE)
"""Quantisation modes (`KVQuantMode`) that are known."""
FLOATS = ("auto", "float16", "half", "bfloat16", "float32", "float")


class Platform(NamedTuple):
    """What vLLM decides by its platform: the dtype that it calls fp8, the dtype of index keys'
    scales, whether conv states are `(dim, tap)` and states of delta nets `(head, key, value)`.
    """

    fp8: str = "float8_e4m3fn"
    index_scale: str = "float32"
    dim_first: bool = False
    key_first: bool = False
    version: str = ""


def platform_of_process() -> Platform:
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
    """A layer as vLLM has registered it, under `name`; `target` is the stem of the target's."""

    config: Any
    name: str
    target: str
    module: Any
    spec: Any
    view: torch.Tensor
    platform: Platform

    @property
    def number(self) -> int:
        """As its dotted name says, where a draft's may go on behind the target's: here they begin
        at 0. Raises UnknownFormat unless the name has one number.
        """
        layers: int = self.config.model_config.get_total_num_hidden_layers()
        return self._named - layers if self._named >= layers else self._named

    @property
    def owner(self) -> str:
        """A draft's layers are marked by vLLM, numbered after the target's, or named otherwise than
        these; a group of EAGLE's may hold the target's layers too.
        """
        marked = getattr(self.module, "is_draft_layer", False)
        later = self._named >= self.config.model_config.get_total_num_hidden_layers()
        return "draft" if marked or later or stem(self.name) != self.target else "target"

    @property
    def _named(self) -> int:
        numbers = [int(part) for part in self.name.split(".") if part.isdecimal()]
        if len(numbers) != 1:
            raise UnknownFormat(
                f"{self.name}: a name with {len(numbers)} numbers is not known, only with the "
                "layer's. Use another model."
            )
        return numbers[0]

    @property
    def model(self) -> Any:
        speculative = self.config.speculative_config if self.owner == "draft" else None
        return getattr(speculative, "draft_model_config", None) or self.config.model_config

    @property
    def is_linear(self) -> bool:
        return type(self.spec).__name__ == "MambaSpec"

    @property
    def backend(self) -> str:
        """vLLM's name of what reads and writes it."""
        spec, module = self.spec, self.module
        return str(spec.mamba_type.name if self.is_linear else module.get_attn_backend().get_name())

    @property
    def element(self) -> str:
        """The dtype of what the kernel writes. Raises UnknownFormat where elements of a whole
        tensor are scaled: that is in no page, and a peer with another scale would read wrong
        values.
        """
        if self.spec.kv_quant_mode.name == "FP8_PER_TENSOR":
            key, value = (getattr(self.module, f"_{role}_scale_float", 1.0) for role in "kv")
            if (key, value) != (1.0, 1.0):
                raise UnknownFormat(
                    f"its values are scaled by k {key} and v {value} of the checkpoint, which is "
                    "not in its pages; only 1.0 is known. Use a checkpoint without KV scales, or "
                    "--kv-cache-dtype auto."
                )
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
        parallel, total = self.config.parallel_config, self.model.get_total_num_kv_heads()
        ranks = parallel.tensor_parallel_size
        return head_shard(self.spec.num_kv_heads, total, parallel.rank % ranks, ranks)

    def packing(self, *words: str) -> str:
        """The name of an inside that only this version's kernel knows."""
        sizes = f"{self.spec.head_size}+{self.spec.head_size_v}"
        return " ".join(("vllm", self.platform.version, self.backend, *words, sizes))


def stem(name: str) -> str:
    """A layer's name before its number: `model.layers`, `draft_model.model.layers`."""
    return re.split(r"\.\d+\.", name)[0]


def read_layer(layer: RegisteredLayer) -> LayerTensor:
    """Raises UnknownFormat, which names the layer and its backend."""
    name = f"{layer.name} ({layer.owner} layer {layer.number}), {layer.backend}"
    with naming(name):
        view, parts = read_linear(layer) if layer.is_linear else read_attention(layer)
    # where all groups are made one, their spec has the window of any layer
    window = getattr(layer.module, "sliding_window", None)
    slides = window or type(layer.spec).__name__.startswith("Sliding")
    prefix, owner = "swa." if slides else "", layer.owner
    return LayerTensor(
        name=name, number=layer.number, view=view, parts=parts, owner=owner, prefix=prefix
    )


def read_linear(layer: RegisteredLayer) -> tuple[torch.Tensor, Parts]:
    """The slots of a layer of linear attention (`MambaBase.bind_kv_cache`)."""
    spec, parallel = layer.spec, layer.config.parallel_config
    kind = LINEAR.get(layer.backend)
    if kind is None or len(spec.shapes) != (1 if kind == "short_conv" else 2):
        raise UnknownFormat(
            f"{len(spec.shapes)} states are not known (known: the conv state and, but of "
            f"SHORT_CONV, the temporal state of {', '.join(LINEAR)}). Turn off what adds states "
            f"(ReplaySSM), or {HERE}."
        )
    ranks = 1 if getattr(spec, "tp_replicated", False) else parallel.tensor_parallel_size
    shard = LinearShard(
        rank=parallel.rank % ranks,
        ranks=ranks,
        groups=getattr(getattr(layer.module, "norm", None), "n_groups", 0),
        spare=0 if kind == "mamba1" else layer.config.num_speculative_tokens,
        dim_first=layer.platform.dim_first,
        key_first=layer.platform.key_first,
    )
    conv, *temporal = spec.shapes
    slot = states(kind, conv, [*chain(*temporal)], spec.dtypes, shard)
    return layer.view, [items(Seq(*slot))]


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
    return whole_items(layer) if mode == OPAQUE else (layer.view, ATTENTION[backend](layer))


def whole_items(layer: RegisteredLayer) -> tuple[torch.Tensor, Parts]:
    """Items of which only the name is known, and which are contiguous in some order of dims. That
    order, the heads and the tokens become part of the name.
    """
    view, strides = layer.view, layer.view.stride()
    inner = sorted(range(1, 4), key=lambda dim: -strides[dim])
    ordered = view.permute(0, *inner)
    if not ordered[0].is_contiguous():
        raise UnknownFormat(
            f"its items move whole only, but they lie among others (strides {strides}). Use a "
            "cache layout in which blocks are contiguous."
        )
    names = {1: "heads", 2: "tokens", 3: "elements"}
    shape = " x ".join(f"{view.shape[dim]} {names[dim]}" for dim in inner)
    item = Cell("kv", ordered[0].nbytes, "uint8")
    heads = f"head {layer.heads.start} of {layer.heads.total}"
    return ordered, [items(item, f"{layer.packing(OPAQUE)}, {shape}, {heads}")]


def index_keys(layer: RegisteredLayer) -> Parts:
    """Index keys of sparse attention, then their scales."""
    if getattr(layer.module, "uses_shuffled_layout", False):
        raise UnknownFormat("shuffled index keys are not known. Use a platform without them.")
    dim, platform = layer.model.hf_text_config.index_head_dim, layer.platform
    page = index_key_page(layer.view.shape[2], dim, dtype=platform.fp8, scale=platform.index_scale)
    return [items(page)]


def latent_rows(layer: RegisteredLayer) -> Parts:
    if getattr(layer.module, "kv_cache_dtype", "auto") == "fp8_ds_mla":
        return [rows(fp8_latent_row())]
    config = layer.model.hf_text_config
    return [rows(latent_row(config.kv_lora_rank, config.qk_rope_head_dim, layer.element))]


def planes(layer: RegisteredLayer) -> Parts:
    """A plane of K and one of V in the place of heads, each `[token, head, dim]`."""
    cells = (Cell(role, layer.spec.head_size, layer.element) for role in ("k", "v"))
    return [rows(layer.heads.of(cell), plane) for plane, cell in enumerate(cells)]


def keys_and_values(layer: RegisteredLayer) -> Parts:
    """`[K | V]` a token and head; in some modes each with a float32 scale behind it."""
    cells: list[Template] = []
    with_scales = layer.spec.kv_quant_mode.name.endswith("TOKEN_HEAD")
    for role, count in (("k", layer.spec.head_size), ("v", layer.spec.head_size_v)):
        cells += scaled(role, count, dtype=layer.element)[: 1 + with_scales]
    return [head_rows(Seq(*cells), layer.heads)]


def transposed_keys(layer: RegisteredLayer) -> Parts:
    """On a CPU: of a head K `[dim, token]`, V `[token, dim]`, or as its isa packs them."""
    key, value, tokens = layer.spec.head_size, layer.spec.head_size_v, layer.view.shape[2]
    dtype, isa = layer.element, getattr(layer.module, "isa", "")
    if isa in ("vec", "vec16"):  # csrc/cpu/cpu_attn_vec.hpp, which vec16 inherits from
        keys = Repeat("dim", key, Repeat("entry", tokens, Cell("k", 1, dtype)))
        values = Repeat("entry", tokens, Cell("v", value, dtype))
        return [head_items(Seq(keys, values), layer.heads)]
    if isa in ("", "rvv") or (isa, dtype) == ("neon", "bfloat16"):
        raise UnknownFormat(
            f"how isa {isa or 'unknown'} packs {dtype} is decided where vLLM is built. Use --dtype "
            "float32 (neon), or hosts of another architecture."
        )
    halves = Seq(Cell("k", key * tokens, dtype), Cell("v", value * tokens, dtype))
    return [head_items(halves, layer.heads, layer.packing(isa, dtype))]


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
