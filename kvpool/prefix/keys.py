"""Keys of prefixes of tokens: equal prefixes have equal keys, others have others.

A key is four sums modulo 2**64, over the tokens of a prefix, of `(token + 1) * factor`, where each
position has four factors of 64 random bits that never leave the process (multilinear hashing). Two
prefixes that differ collide in a sum with a probability of at most 2**-33, in all four of at most
2**-132, whatever they are, as long as who chooses them does not know the factors. All pages of a
prompt take one pass of numpy; a cryptographic hash would take a call for each.
"""

from __future__ import annotations

import hashlib
import os
from typing import TypeVar

import numpy as np
import numpy.typing as npt

SUMS = 4
MIN_POSITIONS = 1 << 13

Sums = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]


def token_ids(tokens: npt.ArrayLike) -> Tokens:
    """Tokens as an array. Raises ValueError unless they are a flat list of numbers from 0 to
    2**31 - 1.
    """
    given = np.asarray(tokens)
    if not given.ndim:
        raise ValueError(
            f"tokens: the ids of the tokens, a flat list of integers, got {tokens!r}. Items for a "
            "number of tokens are allocated by extend."
        )
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"tokens: a flat list of integers, got {given.dtype}{given.shape}.")
    outside = given.astype(np.int64, copy=False) >> 31 if given.size else given
    if outside.any():
        wrong = int(given[np.flatnonzero(outside)[0]])
        raise ValueError(f"tokens: 0 to 2**31 - 1, got {wrong}.")
    return given.astype(np.int32)


class PrefixKeys:
    """Makes keys of prefixes that end at multiples of `page` tokens: uint64 `[SUMS]` each. Keys of
    two of these objects have nothing to do with each other.
    """

    def __init__(self, page: int) -> None:
        self.page = page
        self._secret = os.urandom(64)
        self._factors: Sums = np.zeros((SUMS, 0), dtype=np.uint64)

    def root(self, salt: str) -> Sums:
        """The key of no tokens under a salt."""
        raw = hashlib.blake2b(salt.encode(), digest_size=8 * SUMS, key=self._secret).digest()
        return np.frombuffer(raw, dtype=np.uint64)

    def follow(self, last: Sums, start: int, tokens: Tokens) -> Sums:
        """Keys `[P, SUMS]` of the prefixes that end with each of P pages of `tokens`, which follow
        the `start` tokens whose key is `last`.
        """
        pages = tokens.size // self.page
        if start + tokens.size > self._factors.shape[1]:
            self._grow(start + tokens.size)
        factors = self._factors[:, start : start + tokens.size].reshape(SUMS, pages, self.page)
        numbers = tokens.astype(np.uint64).reshape(pages, self.page)
        numbers += np.uint64(1)
        sums = np.empty((pages, SUMS), dtype=np.uint64)
        np.einsum("spt,pt->ps", factors, numbers, out=sums)
        sums[:1] += last
        return np.cumsum(sums, axis=0, out=sums)

    def _grow(self, positions: int) -> None:
        more = max(positions - self._factors.shape[1], self._factors.shape[1], MIN_POSITIONS)
        fresh = np.frombuffer(os.urandom(8 * SUMS * more), dtype=np.uint64).reshape(SUMS, more)
        self._factors = np.concatenate([self._factors, fresh], axis=1)


class Chain:
    """The first tokens of a request, whose state is written, and the keys of their pages."""

    __slots__ = ("_digests", "_hashing", "_keys", "_tokens", "num_tokens", "salt")

    def __init__(self, hashing: PrefixKeys, salt: str = "") -> None:
        self._hashing, self.salt = hashing, salt
        self.num_tokens = 0
        self._tokens = np.empty(0, dtype=np.int32)
        self._keys = hashing.root(salt)[None]  # of 0, 1, ... pages
        self._digests: list[bytes] = []

    @property
    def pages(self) -> int:
        """Whole pages of the tokens."""
        return self.num_tokens // self._hashing.page

    @property
    def keys(self) -> Sums:
        """The keys `[pages, SUMS]` of the prefixes that end with each page."""
        return self._keys[1 : 1 + self.pages]

    @property
    def tokens(self) -> Tokens:
        """The tokens, `[num_tokens]`."""
        return self._tokens[: self.num_tokens]

    def append(self, tokens: Tokens) -> None:
        """Adds tokens."""
        page, start, done = self._hashing.page, self.num_tokens, self.pages
        self._tokens = _longer(self._tokens, start, start + tokens.size)
        self._tokens[start : start + tokens.size] = tokens
        self.num_tokens += tokens.size
        if self.pages > done:
            fresh = self._tokens[done * page : self.pages * page]
            self._keys = _longer(self._keys, done + 1, self.pages + 1)
            keys = self._hashing.follow(self._keys[done], done * page, fresh)
            self._keys[done + 1 : self.pages + 1] = keys

    def truncate(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        self.num_tokens = min(tokens, self.num_tokens)
        del self._digests[self.pages + 1 :]

    def copy(self) -> Chain:
        """A chain of the same tokens that grows by itself."""
        made = Chain(self._hashing, self.salt)
        made._keys, made._digests = self._keys.copy(), self._digests.copy()
        made._tokens, made.num_tokens = self.tokens.copy(), self.num_tokens
        return made

    def digest(self, tokens: int) -> bytes:
        """The hash of the first `tokens` tokens (whole pages) that events publish: of 32 bytes, the
        same in every process. That of none is blake2b of the salt (UTF-8), that of more blake2b of
        the hash of one page less, and the tokens of the last as little-endian int32.
        """
        known, page = self._digests, self._hashing.page
        if not known:
            known.append(hashlib.blake2b(self.salt.encode(), digest_size=32).digest())
        for number in range(len(known), tokens // page + 1):
            raw = self._tokens[(number - 1) * page : number * page].astype("<i4").tobytes()
            known.append(hashlib.blake2b(known[-1] + raw, digest_size=32).digest())
        return known[tokens // page]


_Rows = TypeVar("_Rows", Sums, Tokens)


def _longer(rows: _Rows, filled: int, least: int) -> _Rows:
    """The first `filled` rows with room for `least` in all, and for more later."""
    if least <= len(rows):
        return rows
    room = np.empty((max(least, 2 * len(rows)), *rows.shape[1:]), dtype=rows.dtype)
    room[:filled] = rows[:filled]
    return room
