"""What a prefix cache asks of a store that outlives it, such as `disagg.store.Store`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from kvpool.layout import RequestAddress
from kvpool.prefix.chain import Chain, Media


class StoreHit(Protocol):
    """What a store has of a prefix: so many tokens, a multiple of its `chunk_tokens`."""

    @property
    def tokens(self) -> int: ...


class StoreEnded(Protocol):
    """How a lookup or read has ended: `failure` says why a read has failed."""

    @property
    def hit(self) -> StoreHit: ...

    @property
    def failure(self) -> str | None: ...


class PrefixStore(Protocol):
    """State of chunks of `chunk_tokens` tokens, which other processes have written or will read."""

    chunk_tokens: int

    def keys(self, tokens: npt.ArrayLike, salt: str = "", media: Media = ()) -> Any:
        """The keys of the whole chunks of `tokens`, by which all calls below know a prefix."""

    def ask(self, keys: Any) -> int:
        """Begins to look up how many of the first tokens are there; returns a number."""

    def read(self, keys: Any, address: RequestAddress, positions: range, *, hit: Any) -> int:
        """Begins to read positions of a prefix into the items of a request; returns a number."""

    def wait(self, job: int) -> StoreEnded:
        """Waits for a lookup or read, for a bounded time: afterwards nothing of it is written any
        more.
        """

    def write(self, keys: Any, address: RequestAddress, positions: range) -> object:
        """Copies the whole chunks of positions of a request, and writes them later."""


def write_chunks(store: PrefixStore, chain: Chain, before: int, address: RequestAddress) -> None:
    """Writes the chunks that a request has filled since it had `before` tokens stored."""
    first = before // store.chunk_tokens
    # else all tokens would be hashed for nothing
    if chain.num_tokens // store.chunk_tokens > first:
        keys = store.keys(chain.tokens, chain.salt, chain.media)
        store.write(keys, address, range(first * store.chunk_tokens, chain.num_tokens))
