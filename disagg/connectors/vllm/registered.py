"""A layer as vLLM has registered it: its module, its spec and its view, read by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disagg.connectors.scales import LayerScale
from disagg.connectors.tensors import UnknownFormat, head_shard
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import Heads

OPEN_WINDOWS = "CompressorBackend"
"""The backend of what DeepSeek-V4 has not yet compressed."""
RATIOS = {8: 4, 128: 128, None: 2}
"""Tokens a state, by the window of what is not yet compressed: states of 4 overlap, of 2 there is a
ring instead.
"""
V4_LATENTS = (
    *("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "CPU_V4_MLA_SPARSE"),
    *("FLASHMLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHINFER_MLA_SPARSE_DSV41"),
    "DEEPSEEK_SPARSE_SWA",
)
V4_KEYS = (
    *("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER"),
    "CPU_V4_INDEXER",
)
V4 = (*V4_LATENTS, *V4_KEYS, OPEN_WINDOWS)
"""Backends of DeepSeek-V4 and V4.1, which alone may keep one state for several tokens."""
FLOATS = ("auto", "float16", "half", "bfloat16", "float32", "float")


class Platform(NamedTuple):
    """What vLLM decides by its platform: the dtype that it calls fp8, the dtype of index keys'
    scales, whether conv states are `(dim, tap)` and states of delta nets `(head, key, value)`, and
    whether the scales of NVFP4 values are in tiles.
    """

    fp8: str = "float8_e4m3fn"
    index_scale: str = "float32"
    dim_first: bool = False
    key_first: bool = False
    scale_tiles: bool = False
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
        # csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu; on other devices FlashInfer writes them
        scale_tiles=bool(current_platform.is_device_capability_family(100)),
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
    def ratio(self) -> int:
        """Tokens for which it keeps one state, or whose keys it holds until they are compressed to
        one (DeepSeek-V4). Raises UnknownFormat for windows of other models.
        """
        if self.is_linear:
            return 1
        if self.backend != OPEN_WINDOWS:
            return int(self.spec.tokens_per_state)
        window = getattr(self.spec, "sliding_window", None)
        if window not in RATIOS:
            raise UnknownFormat(f"{self.name}: window {window} is not known. Use another model.")
        return RATIOS[window]

    @property
    def prefix(self) -> str:
        """What is put before its roles."""
        if self.ratio > 1:
            return f"c{self.ratio}."
        # where all groups are made one, their spec has the window of any layer
        slides = getattr(self.module, "sliding_window", None)
        return "swa." if slides or type(self.spec).__name__.startswith("Sliding") else ""

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
        """The dtype of what the kernel writes."""
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


def module_scales(
    modules: Mapping[str, Any], layers: Mapping[str, tuple[str, int]]
) -> Iterator[LayerScale]:
    """What modules of attention scale keys and values by; `layers`: owner and number, by name."""
    for name, (owner, number) in layers.items():
        for role in "kv":
            value = getattr(modules[name], f"_{role}_scale", None)
            yield LayerScale(owner=owner, layer=number, role=role, value=value)
