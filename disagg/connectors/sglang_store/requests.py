"""Which tokens of a request of SGLang's say, with its salts, all that their state depends on.

Of a picture SGLang's tokens and tree have a number of 64 bits, from which its pad values are made.
That is no name that a store could take: a request may choose it (`mm_hashes`), it says nothing of
a picture's shape, and of tensors on a GPU it is no cryptographic hash. Requests whose numbers are
equal share state in SGLang's own tree, and its embeddings: even where a store's key had a digest of
the picture, what lies behind it could be another's.
"""

from __future__ import annotations

from sys import maxsize
from typing import Any

PAD = 1_000_000
"""Pad values are not less (MM_PAD_SHIFT_VALUE), tokens are."""


def keyed_tokens(req: Any) -> int:
    """How many of the first tokens have keys: those before its first picture or other medium."""
    if not (
        req.lora_id is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and not req.token_type_ids
        and req.session is None
        and req.beam_group is None
        and not req.skip_radix_cache_insert
    ):
        return 0
    media = req.multimodal_inputs
    if media is None:
        return maxsize
    starts = [start for item in media.mm_items for start, _ in item.offsets or [(0, 0)]]
    pads = (place for place, token in enumerate(req.origin_input_ids) if token >= PAD)
    return int(min([next(pads, maxsize), *starts]))
