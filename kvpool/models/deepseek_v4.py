"""DeepSeek-V4: a window on all layers, compressed entries on some."""

from __future__ import annotations

from typing import Any

from kvpool.layout.formats import IndexKey, Ring, V4Latent
from kvpool.models.config import Fields
from kvpool.models.declaration import Declaration
from kvpool.models.layer_types import SLIDING
from kvpool.models.rules import HEADS
from kvpool.pools.dsv4 import DSv4Pool

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek_v4(fields: Fields) -> Declaration:
    """Ratios by layer: compress_ratios (published configs; draft layers follow), or layer_types
    with compress_rates (transformers).
    """
    fields.ignore(HEADS, "compress_rope_theta", "o_lora_rank", "num_hash_layers")
    rated = _rated(fields) if fields.has("layer_types") else None
    if rated is not None and not fields.has("compress_ratios"):
        return _compressed(fields, rated)
    ratios = _ratios_of(fields)[: fields.num_layers]
    if rated not in (None, ratios):
        raise fields.wrong("compress_ratios", "equal to layer_types with compress_rates")
    return _compressed(fields, ratios)


def deepseek_v4_draft(fields: Fields, layers: range) -> Declaration:
    """The window only, unless compress_ratios has entries for the draft's layers."""
    ratios = deepseek_v4(fields).arguments["compress_ratios"]
    further = _ratios_of(fields)[len(ratios) :] if fields.has("compress_ratios") else ()
    if further and len(further) != len(layers):
        least, most = layers.start, layers.stop
        raise ValueError(
            f"{fields.model} config: compress_ratios must have {least} entries, or {most} with the "
            f"draft's, got {least + len(further)}."
        )
    return _compressed(fields, ratios + (further or (0,) * len(layers)))


def _compressed(fields: Fields, ratios: tuple[int, ...]) -> Declaration:
    """A pool of these ratios; rope is a size, or a fraction of head_dim."""
    head_dim = fields.whole("head_dim", 2)
    if fields.has("partial_rotary_factor") and not fields.has("qk_rope_head_dim"):
        part = fields.get("partial_rotary_factor")
        whole = type(part) is float and 0 < part < 1 and (part * head_dim).is_integer()
        if not whole:
            raise fields.wrong("partial_rotary_factor", f"a whole part of head_dim, {head_dim}")
        rope = int(part * head_dim)
    else:
        rope = fields.whole("qk_rope_head_dim", 1, head_dim - 1)
    arguments: dict[str, Any] = {
        "latent_dim": head_dim - rope,
        "qk_rope_head_dim": rope,
        "index_head_dim": fields.whole("index_head_dim"),
        "overlap_ratio": _rate(fields, SPARSE) if fields.has("layer_types") else 4,
        "window": fields.whole("sliding_window", 2) - 1,
        "compress_ratios": ratios,
    }
    return Declaration(
        pool=DSv4Pool,
        arguments=arguments,
        kinds=frozenset((V4Latent, IndexKey, Ring)),
        page_size=256,  # every compress ratio must divide a page
        speculation={"speculation": True},
    )


def _rate(fields: Fields, name: str) -> int:
    return fields.inner("compress_rates").whole(name, 2)


def _rated(fields: Fields) -> tuple[int, ...]:
    rates = {SLIDING: 0, SPARSE: _rate(fields, SPARSE), HEAVY: _rate(fields, HEAVY)}
    if rates[SPARSE] == rates[HEAVY]:
        raise fields.wrong("compress_rates", f"two rates that differ for {SPARSE} and {HEAVY}")
    return tuple(
        rates[name]
        for name in fields.each("layer_types", (SLIDING, SPARSE, HEAVY), fields.num_layers)
    )


def _ratios_of(fields: Fields) -> tuple[int, ...]:
    """compress_ratios, those of the draft's layers too where they are given."""
    ratios = fields.get("compress_ratios")
    if not isinstance(ratios, (list, tuple)) or len(ratios) < fields.num_layers:
        raise fields.wrong("compress_ratios", f"{fields.num_layers} numbers or more, one a layer")
    return fields.each("compress_ratios", (0, 4, 128), len(ratios))
