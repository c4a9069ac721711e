"""The keys of a prefix's whole chunks, which a thread of the store makes where it needs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from typing_extensions import Self

from kvpool.prefix.chain import Chain, Tokens


class ChunkKeys:
    """The keys of a prefix's whole chunks: a chain of hashes over salt, tokens and media."""

    __slots__ = ("_growing", "_keys", "_lock", "count")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)
        self._growing: tuple[Chain, Tokens] | None = None
        self._lock = threading.Lock()
        self.count = len(self._keys)

    @classmethod
    def when_needed(cls, chain: Chain, tokens: Tokens) -> Self:
        """Of a chain, once `tokens` are added to it. Whoever asks for `keys` first does that, since
        of a long prompt it takes longer than a scheduler has. Until `settle` the chain is theirs.
        """
        made = cls(())
        made._growing = chain, tokens
        made.count = (chain.num_tokens + tokens.size) // chain.page
        return made

    @property
    def keys(self) -> tuple[bytes, ...]:
        self.settle()
        return self._keys

    def settle(self) -> None:
        """Adds the tokens to the chain, unless that was done."""
        with self._lock:
            if self._growing is not None:
                chain, tokens = self._growing
                chain.append(tokens)
                self._keys, self._growing = tuple(chain.keys), None
