"""Events for routers, in the form in which vLLM publishes them (vllm/distributed/kv_events.py).

`encode([...])` is the payload of a batch; vLLM sends it over a ZeroMQ PUB socket as the last of
three frames, after the topic and a number of 8 bytes, big-endian, that counts batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvpool.layout import Space
from kvpool.layout.grid import Ints
from kvpool.prefix.chain import Chain, Key


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive items were kept: they hold the state of `block_size` tokens each.

    A hash is the key of a prefix (kvpool.prefix.chain), `parent_block_hash` that of what precedes
    the first item. `extra_keys` has the salt of each. `group_idx` numbers the allocator's id lists.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Items were taken: the state of these prefixes is gone from an id list."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """All prefixes were forgotten."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


def encode(events: Sequence[Event], data_parallel_rank: int | None = None) -> bytes:
    """A batch of events as msgpack, with the time of now."""
    return msgspec.msgpack.encode(_Batch(time.time(), events, data_parallel_rank))


class EventLog:
    """The events since they were last taken. `medium` is vLLM's word for the memory."""

    def __init__(self) -> None:
        self.medium: str | None = None
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events, in order; forgets them."""
        taken, self._events = self._events, []
        return taken

    def stored(
        self, *, group: int, space: Space, tokens: int, chain: Chain, keys: list[Key], numbers: Ints
    ) -> None:
        """Items `numbers` of an id list were stored, of `tokens` tokens of a chain each; the
        prefixes that end with its items have `keys`.
        """
        kind, window = "mamba" if space.per_request else "full_attention", None
        if not space.per_request and space.window is not None:
            kind, window = "sliding_window", space.window * space.tokens_per_entry
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            first, stop = int(run[0]), int(run[-1]) + 1
            event = BlockStored(
                block_hashes=keys[first:stop],
                parent_block_hash=keys[first - 1] if first else None,
                token_ids=chain.tokens[first * tokens : stop * tokens].tolist(),
                block_size=tokens,
                lora_id=None,
                medium=self.medium,
                lora_name=None,
                extra_keys=[(chain.salt,)] * run.size if chain.salt else None,
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            self._events.append(event)

    def removed(self, group: int, keys: list[Key]) -> None:
        """Items of an id list, of prefixes with these keys, were taken."""
        self._events.append(BlockRemoved(keys, self.medium, group))

    def cleared(self) -> None:
        """All were forgotten."""
        self._events.append(AllBlocksCleared())
