"""What a prefix cache asks of a store that outlives it, such as `disagg.store.Store`."""

from __future__ import annotations

from typing import Protocol

import numpy.typing as npt

from kvpool.layout import RequestAddress
from kvpool.prefix.chain import Chain


class StoreEnded(Protocol):
    """How a read has ended: `failure` says why it has failed."""

    @property
    def failure(self) -> str | None: ...


class PrefixStore(Protocol):
    """State of chunks of `chunk_tokens` tokens, which other processes have written or will read."""

    chunk_tokens: int

    def lookup(self, tokens: npt.ArrayLike, salt: str = "") -> int:
        """How many of the first tokens are there, a multiple of `chunk_tokens`."""

    def read(
        self, tokens: npt.ArrayLike, address: RequestAddress, positions: range, *, salt: str = ""
    ) -> int:
        """Begins to read positions of a prefix into the items of a request; returns a number."""

    def wait(self, job: int) -> StoreEnded:
        """Waits for a read, for a bounded time: afterwards nothing of it is written any more."""

    def write(
        self, tokens: npt.ArrayLike, address: RequestAddress, positions: range, *, salt: str = ""
    ) -> object:
        """Copies the whole chunks of positions of a request, and writes them later."""


def write_chunks(store: PrefixStore, chain: Chain, before: int, address: RequestAddress) -> None:
    """Writes the chunks that a request has filled since it had `before` tokens stored."""
    first = before // store.chunk_tokens * store.chunk_tokens
    positions = range(first, chain.num_tokens)
    store.write(chain.tokens, address, positions, salt=chain.salt)
