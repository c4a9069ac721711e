"""Bytes of a parameter as a checkpoint stores it: its dtype, or what quantization_config says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from kvpool.models.config import Fields, short
from kvpool.models.parameters import LayerParameters, NotCounted

DTYPES = {"bfloat16": ("bf16", 2.0), "float16": ("fp16", 2.0), "float32": ("fp32", 4.0)}
SCALE = 2  # bytes of a group's scale in integer formats (float16)
ALL = frozenset(("attention", "mlp", "experts"))
# by the last word of a module's name
PARTS = {
    "attention": ("attn", "self_attn", "attention", "linear_attn"),
    "mlp": ("mlp", "feed_forward", "shared_experts", "shared_expert"),
    "experts": ("mlp", "feed_forward", "experts", "block_sparse_moe"),
}
# modules that are counted as unquantised anyway, or that are not counted
UNQUANTISED = re.compile(
    r"lm_head|embed|wte|norm|gate$|router|visual|vision|audio|projector|mtp|eh_proj|shared_head|"
    r"conv1d|in_proj_(a|b|ba)$|sinks|indexer|weights_proj|hc_"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How parameters are stored: `quantised` bytes each for `parts` of a layer (for `experts` their
    own number), `plain` bytes for the rest. `skipped` are parts that are not quantised, of a layer
    or (None) of all.
    """

    name: str
    plain: float
    quantised: float
    experts: float
    skipped: frozenset[tuple[int | None, str]] = frozenset()

    def layer_bytes(self, layer: LayerParameters, number: int) -> float:
        total = layer.other * self.plain
        for part in ALL:
            plain = self.skipped & {(number, part), (None, part)}
            size = self.experts if part == "experts" else self.quantised
            total += getattr(layer, part) * (self.plain if plain else size)
        return total


def storage(fields: Fields) -> Storage:
    """The storage that a config says. Raises NotCounted for a quantisation that is not known."""
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    if str(dtype or "bfloat16") not in DTYPES:
        raise NotCounted(f"{fields.model} config: dtype {short(dtype)} is not known.")
    name, plain = DTYPES[str(dtype or "bfloat16")]
    name = name if dtype else f"{name}, as it gives no dtype"
    quantisation = fields.get("quantization_config") or fields.get("compression_config")
    if quantisation is None:
        return Storage(name=name, plain=plain, quantised=plain, experts=plain)
    if not isinstance(quantisation, Mapping):
        raise fields.wrong("quantization_config", "an object")
    own = Fields(quantisation, fields.model, "quantization_config.")
    method, size = _method(own)
    section = own if own.has("expert_dtype") else fields
    experts = f", experts {section.get('expert_dtype')}" if section.has("expert_dtype") else ""
    return Storage(
        name=f"{method}{experts}, the rest {name}",
        plain=plain,
        quantised=plain if method == "mxfp4" else size,
        experts=_expert_bytes(section, size),
        skipped=frozenset(_skipped(own)),
    )


def _expert_bytes(fields: Fields, size: float) -> float:
    """DeepSeek-V4 stores its experts in a dtype of their own."""
    if not fields.has("expert_dtype") or fields.get("expert_dtype") == "fp8":
        return size
    if fields.get("expert_dtype") != "fp4":
        raise NotCounted(str(fields.wrong("expert_dtype", "'fp8' or 'fp4'")))
    return 0.5 + 1 / 32


def _method(fields: Fields) -> tuple[str, float]:
    """A name for a quantisation, and its bytes of a parameter with its share of the scales."""
    method = fields.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        if not fields.has("weight_block_size"):
            return "fp8", 1
        return "fp8", 1 + 4 / prod(fields.each("weight_block_size", range(1, 1 << 16)))
    if method in ("awq", "gptq"):
        bits, group = fields.whole("bits", 2, 8), fields.get("group_size")
        if fields.flag("lm_head"):
            raise NotCounted(str(fields.wrong("lm_head", "false")))
        scales = (SCALE + bits / 8) / fields.whole("group_size") if group not in (None, -1) else 0
        return f"{method} of {bits} bits", bits / 8 + scales
    if method == "mxfp4":
        return "mxfp4", 0.5 + 1 / 32
    if method == "bitsandbytes":
        if fields.flag("load_in_8bit"):
            return "bitsandbytes of 8 bits", 1
        if fields.flag("load_in_4bit"):
            absmax = 1 if fields.flag("bnb_4bit_use_double_quant") else 4
            return "bitsandbytes of 4 bits", 0.5 + absmax / 64
    if method == "modelopt" and fields.get("quant_algo") in ("FP8", "NVFP4"):
        return ("fp8", 1) if fields.get("quant_algo") == "FP8" else ("nvfp4", 0.5 + 1 / 16)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    raise NotCounted(f"{fields.model} config: quantisation {short(method)} is not known.")


def _compressed_tensors(fields: Fields) -> tuple[str, float]:
    """One group of layers that are all stored alike."""
    groups = list(fields.inner("config_groups").values.values())
    if (
        len(groups) != 1
        or not isinstance(groups[0], Mapping)
        or groups[0].get("targets") != ["Linear"]
    ):
        raise NotCounted(str(fields.wrong("config_groups", "one group of all Linear modules")))
    weights = Fields(groups[0], fields.model, f"{fields.inside}config_groups.").inner("weights")
    bits, group = weights.whole("num_bits", 2, 8), weights.get("group_size")
    scale = 1 if weights.get("type") == "float" and bits == 4 else SCALE  # nvfp4: e4m3
    scales = scale / weights.whole("group_size") if group not in (None, -1) else 0
    return f"{weights.get('type')} of {bits} bits", bits / 8 + scales


def _skipped(fields: Fields) -> Iterator[tuple[int | None, str]]:
    """Parts that a quantisation leaves as they are. Raises NotCounted for part of such a part."""
    names = (
        "modules_to_not_convert",
        "ignore",
        "ignored_layers",
        "exclude_modules",
        "llm_int8_skip_modules",
    )
    for module in (module for name in names for module in fields.get(name) or ()):
        text = re.sub(r"\.?[*$^]|re:|\\", "", str(module)).strip(".")
        layer = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)(?:\.|$)", text)
        last = text.rpartition(".")[2]
        number = int(layer[1]) if layer else None
        parts = (
            ALL if layer and last == layer[1] else {p for p, ends in PARTS.items() if last in ends}
        )
        if not parts and not UNQUANTISED.search(text):
            raise NotCounted(
                f"{fields.model} config: {short(module)} is not quantised; its size is not known."
            )
        yield from ((number, part) for part in parts)
