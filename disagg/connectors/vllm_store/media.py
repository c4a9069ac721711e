"""What vLLM says of the pictures and other media of a request. Nothing of vLLM is imported.

vLLM names a medium by a hash (`mm_hash`), for its own caches. It is not enough for a store: it says
nothing of the options that an engine gives all its processors, nor of the processor's files, and
where a client has named the medium (`uuid`), and gives options too, it is a hash of that name. So
a key has a digest of what the encoder is given, and the hash beside it. A client's own name is not
taken at all: the state of what it named before may still be in this engine's caches.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from sys import maxsize
from typing import Any

from disagg.connectors.store.media import Medium

log = logging.getLogger("vllm.kvpool")

HASH = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""Of blake3 or sha256, or of sha512 (`mm_hasher_algorithm`)."""
NO_MATTER = "text_config", "architectures", "dtype", "torch_dtype", "transformers_version"
"""Fields of a configuration that say nothing of encoders, or what namespaces say."""
PRUNING = "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype"
"""Options of vLLM on which an encoder's output depends."""
ENTRIES = 16
"""At least so many numbers an encoder is given, or gives, for one position: hundreds in fact."""


def encoder(config: Any) -> str | None:
    """What a model makes of media, beside its weights; None where that is not known."""
    model = config.model_config
    options = model.multimodal_config
    if options is None:
        return None
    for unknown, why in (
        (config.ec_transfer_config is not None, "encoders are other engines'"),
        (model.is_encoder_decoder, "its encoder's output has no place in the prompt"),
        (options.mm_processor_cache_type == "shm", "the scheduler is not given them with "
         "mm_processor_cache_type shm: use lru"),
    ):  # fmt: skip
        if unknown:
            log.warning("only state before a prompt's first picture is stored: %s.", why)
            return None
    pruning = {name: getattr(options, name, None) for name in PRUNING}
    return json.dumps([_encoders(model.hf_config.to_dict()), pruning], sort_keys=True, default=str)


def _encoders(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Of a configuration all but the language model, paths and versions."""
    return {
        str(name): _encoders(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in NO_MATTER and not str(name).startswith("_")
    }


def media(request: Any, encoder: str | None) -> tuple[list[Medium], int]:
    """Those of a request, in order, up to the first unknown one; and how many tokens are before
    that one.
    """
    known_media: list[Medium] = []
    for feature in sorted(request.mm_features, key=lambda one: one.mm_position.offset):
        place, lora = feature.mm_position, request.lora_request
        adapted = None if lora is None else f"{lora.lora_name}:{feature.mm_hash}"
        if (
            encoder is None
            or not HASH.fullmatch(feature.mm_hash or "")
            or feature.identifier not in (feature.mm_hash, adapted)
            or not _is_whole(feature.data, place.length)
        ):
            return known_media, place.offset
        # an adapter may change encoders too (enable_tower_connector_lora)
        name = encoder, feature.modality, feature.mm_hash, feature.identifier == adapted
        positions = range(place.offset, place.offset + place.length)
        known_media.append(Medium(positions, (*name, place.is_embed), feature.data))
    return known_media, maxsize


def _is_whole(item: Any, length: int) -> bool:
    """Whether an item has what its encoder is given. Where a request's state or its encoder's
    output is to come from another engine, it may have sizes alone (`allow_missing_mm_embeddings`).
    """
    if item is None or length < 1:
        return False
    return _entries(list(item.get_data().values())) >= ENTRIES * length


def _entries(values: Any) -> int:
    """Of tensors in lists."""
    if isinstance(values, list | tuple):
        return sum(map(_entries, values))
    return int(values.numel()) if hasattr(values, "numel") else 0
