"""Model types that keep a latent a token, and those of them with an indexer."""

from __future__ import annotations

from dataclasses import replace

from kvpool.layout.formats import MLA
from kvpool.models.config import Fields
from kvpool.models.declaration import Layer
from kvpool.models.layer_types import FULL, INDEXED, SLIDING, always, listed, rotated_layers
from kvpool.models.rules import HEAD_DIM, Family, indexed, latent


def _dots3_note(fields: Fields, name: str) -> Layer:
    """Window layers have rows of their own, which per_layer_config gives."""
    if name == SLIDING and not fields.has("per_layer_config"):
        raise fields.wrong("per_layer_config", "given, as transformers writes it")
    return latent(fields, name)


def _glm4_moe_lite(fields: Fields, name: str) -> Layer:
    """Another name of the rope key's dim is head_dim."""
    rope = fields.whole("qk_rope_head_dim")
    if fields.has(HEAD_DIM) and fields.get(HEAD_DIM) != rope:
        raise fields.wrong(HEAD_DIM, f"qk_rope_head_dim, {rope}")
    return latent(fields, name)


def _mistral_large4(fields: Fields, layers: list[Layer]) -> list[Layer]:
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
    kept: list[Layer] = []
    for n, (row, *keys) in enumerate(indexed(fields, layers)):
        if isinstance(row.kind, MLA) and not rotated[n]:
            row = replace(row, kind=replace(row.kind, qk_rope_head_dim=0))
        kept.append((row, *keys) if sources[n] == n else tuple(keys))
    return kept


def _hy_v4(fields: Fields, layers: list[Layer]) -> list[Layer]:
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
    **dict.fromkeys(("axk1", "deepseek_v2", "minicpm3", "mistral4", "youtu"), Family(latent)),
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
