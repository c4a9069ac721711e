"""The keys of a prefix's whole chunks, which a thread of the store makes where it needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from typing_extensions import Self

from kvpool.prefix.chain import Chain, Tokens


class ChunkKeys:
    """The keys of a prefix's whole chunks: a chain of hashes over salt, tokens and media."""

    __slots__ = ("_keys", "_lock", "_make", "count")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)
        self._make: Callable[[], Sequence[bytes]] | None = None
        self._lock = threading.Lock()
        self.count = len(self._keys)

    @classmethod
    def when_needed(cls, count: int, make: Callable[[], Sequence[bytes]]) -> Self:
        """So many. The first use of `keys` calls `make`: for a long prompt that takes longer than
        a scheduler has. Until `settle` what `make` uses must not change.
        """
        keys = cls(())
        keys.count, keys._make = count, make
        return keys

    @property
    def keys(self) -> tuple[bytes, ...]:
        self.settle()
        return self._keys

    def settle(self) -> None:
        """Makes the keys, unless that was done. Raises ValueError for tokens that are none."""
        with self._lock:
            if self._make is not None:
                self._keys, self._make = tuple(self._make()), None


def grown(chain: Chain, token_ids: Tokens) -> list[bytes]:
    """The keys of a chain to which tokens are added."""
    chain.append(token_ids)
    return chain.keys
