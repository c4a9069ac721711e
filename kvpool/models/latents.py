"""Model types that keep a latent a token, those of them with an indexer, and DeepSeek-V4: a window
on all layers, compressed entries on some.
"""

from __future__ import annotations

from dataclasses import replace

from kvpool.layout.formats import MLA, IndexKey, Ring, V4Latent
from kvpool.models.config import Fields
from kvpool.models.layer_types import FULL, INDEXED, SLIDING, always, listed, rotated_layers
from kvpool.models.rules import HEAD_DIM, HEADS, Declaration, Family, LayerStates, indexed, latent
from kvpool.pools.typed import DSv4Pool

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _dots3_note(fields: Fields, name: str) -> LayerStates:
    """Window layers have rows of their own, which per_layer_config gives."""
    if name == SLIDING and not fields.has("per_layer_config"):
        raise fields.wrong("per_layer_config", "given, as transformers writes it")
    return latent(fields, name)


def _glm4_moe_lite(fields: Fields, name: str) -> LayerStates:
    """Another name of the rope key's dim is head_dim."""
    rope = fields.whole("qk_rope_head_dim")
    if fields.has(HEAD_DIM) and fields.get(HEAD_DIM) != rope:
        raise fields.wrong(HEAD_DIM, f"qk_rope_head_dim, {rope}")
    return latent(fields, name)


def _mistral_large4(fields: Fields, layers: list[LayerStates]) -> list[LayerStates]:
    """Layers that no_rope_layers lists as 0 have no rope key, and those whose kv_source_layers is
    another layer read that layer's latents: they keep an indexer's key, or nothing.
    """
    count = len(layers)
    rotated = rotated_layers(fields, count)
    sources = tuple(range(count))
    if fields.has("kv_source_layers"):
        sources = fields.each("kv_source_layers", range(count), count)
    if any(source > n or sources[source] != source for n, source in enumerate(sources)):
        raise fields.wrong("kv_source_layers", "earlier layers that are their own source")
    kept: list[LayerStates] = []
    for n, (row, *keys) in enumerate(indexed(fields, layers)):
        if isinstance(row.kind, MLA) and not rotated[n]:
            row = replace(row, kind=replace(row.kind, qk_rope_head_dim=0))
        kept.append((row, *keys) if sources[n] == n else tuple(keys))
    return kept


def _hy_v4(fields: Fields, layers: list[LayerStates]) -> list[LayerStates]:
    """Without indexer_types: full on the first layer, and on every fourth from the second."""
    if fields.has("indexer_types"):
        return indexed(fields, layers)
    return [layer if n == 0 or n % 4 == 1 else layer[:1] for n, layer in enumerate(layers)]


def _two_a_block(fields: Fields) -> int:
    """A block has two attentions; num_hidden_layers, where it is given, counts these."""
    if fields.has("num_layers"):
        fields.ignore("num_hidden_layers")
        return 2 * fields.whole("num_layers")
    return fields.num_layers


INDEXED_LATENTS = Family(latent, always(INDEXED), names=(FULL, INDEXED), also=indexed)
FAMILIES: dict[str, Family] = {
    "axk1 deepseek_v2 minicpm3 mistral4 youtu": Family(latent),
    "deepseek_v3": Family(latent, draft=FULL),
    "glm4_moe_lite": Family(_glm4_moe_lite),
    "longcat_flash": Family(latent, layers=_two_a_block),
    "axk2": Family(latent, always(INDEXED), names=(FULL, INDEXED)),
    "glm_moe_dsa": INDEXED_LATENTS,
    "deepseek_v32": replace(INDEXED_LATENTS, draft=INDEXED),
    "hy_v4": Family(latent, always(INDEXED), names=(FULL, INDEXED), also=_hy_v4),
    "mistral_large4_text": Family(latent, always(INDEXED), names=(INDEXED,), also=_mistral_large4),
    "dots3_note_text": Family(_dots3_note, listed, names=(FULL, SLIDING, INDEXED)),
}


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
    draft = _compressed(fields, ratios + (further or (0,) * len(layers)))
    return replace(draft, layers=tuple(layers))


def _compressed(fields: Fields, ratios: tuple[int, ...]) -> Declaration:
    """A pool of these ratios; rope is a size, or a fraction of head_dim."""
    head_dim = fields.whole("head_dim", 2)
    if fields.has("partial_rotary_factor") and not fields.has("qk_rope_head_dim"):
        part = fields.get("partial_rotary_factor")
        if type(part) is not float or not 0 < part < 1 or (part * head_dim) % 1:
            raise fields.wrong("partial_rotary_factor", f"a whole part of head_dim, {head_dim}")
        rope = int(part * head_dim)
    else:
        rope = fields.whole("qk_rope_head_dim", 1, head_dim - 1)
    rates = fields.inner("compress_rates") if fields.has("layer_types") else None
    return Declaration(
        pool=DSv4Pool,
        arguments={
            "latent_dim": head_dim - rope,
            "qk_rope_head_dim": rope,
            "index_head_dim": fields.whole("index_head_dim"),
            "overlap_ratio": rates.whole(SPARSE, 2) if rates else 4,
            "window": fields.whole("sliding_window", 2) - 1,
            "compress_ratios": ratios,
        },
        kinds=frozenset((V4Latent, IndexKey, Ring)),
        layers=tuple(range(len(ratios))),
        page_size=256,  # every compress ratio must divide a page
        speculation={"speculation": True},
    )


def _rated(fields: Fields) -> tuple[int, ...]:
    compress_rates = fields.inner("compress_rates")
    rates = {SLIDING: 0, **{name: compress_rates.whole(name, 2) for name in (SPARSE, HEAVY)}}
    if rates[SPARSE] == rates[HEAVY]:
        raise fields.wrong("compress_rates", f"two rates that differ for {SPARSE} and {HEAVY}")
    names = fields.each("layer_types", tuple(rates), fields.num_layers)
    return tuple(rates[name] for name in names)


def _ratios_of(fields: Fields) -> tuple[int, ...]:
    """compress_ratios, those of the draft's layers too where they are given."""
    ratios = fields.get("compress_ratios")
    if not isinstance(ratios, (list, tuple)) or len(ratios) < fields.num_layers:
        raise fields.wrong("compress_ratios", f"{fields.num_layers} numbers or more, one a layer")
    return fields.each("compress_ratios", (0, 4, 128), len(ratios))
