"""Events for routers, in the form in which vLLM publishes them (vllm/distributed/kv_events.py).

`encode([...])` is the payload of a batch; vLLM sends it over a ZeroMQ PUB socket as the last of
three frames, after the topic and a number of 8 bytes, big-endian, that counts batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvpool.prefix.chain import Chain

ExtraKeys = tuple[str | tuple[str, int], ...]


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive items were kept: they hold the state of `block_size` tokens each.

    A hash is the key of a prefix (kvpool.prefix.chain), `parent_block_hash` that of what precedes
    the first item. `extra_keys` has the salt of each, and its media: a digest in hex, and where
    they begin, counted from its first token. `group_idx` numbers the allocator's id lists.
    `locality`: "LOCAL", the memory is the publisher's own (vLLM 0.32 and newer).
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Items were taken: the state of these prefixes is gone from an id list."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """All prefixes were forgotten."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


def extra_keys(chain: Chain, items: range, tokens: int) -> list[ExtraKeys | None] | None:
    """What the keys of items of `tokens` tokens say beside these."""
    if not chain.salt and not chain.media:
        return None
    salts = (chain.salt,) if chain.salt else ()
    of_items: list[ExtraKeys | None] = []
    for start in range(items.start * tokens, items.stop * tokens, tokens):
        media = (
            (span.digest.hex(), span.positions.start - start)
            for span in chain.media
            if span.positions.start < start + tokens and span.positions.stop > start
        )
        of_items.append((*salts, *media) or None)
    return of_items


def encode(events: Sequence[Event], data_parallel_rank: int | None = None) -> bytes:
    """A batch of events as msgpack, with the time of now."""
    return msgspec.msgpack.encode(_EventBatch(time.time(), events, data_parallel_rank))
