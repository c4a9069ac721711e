"""Keys of prefixes of tokens: a chain of hashes, the same in every process.

The key of no tokens is blake2b of the salt (UTF-8); that of a longer prefix is blake2b of the key
of one page less and of the page's tokens as little-endian int32. A key is 32 bytes. Events for
routers publish these keys.

A picture's tokens do not depend on what it shows. So the key of a page with a part of a
`MediaSpan` in it is blake2b, with `person=b"media"`, of the key of one page less, of the number of
spans, of each span (where it begins, counted from the page's first token, how many tokens it has,
its digest; in this order) and of the page's tokens; the numbers are little-endian int64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PrefixKey = bytes
KEY_BYTES = 32

Tokens = npt.NDArray[np.int32]


def token_ids(tokens: npt.ArrayLike) -> Tokens:
    """Tokens as an array. Raises ValueError for what is no flat list of 0 to 2**31 - 1."""
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        with suppress(struct.error):  # what it refuses is told below
            # a third of the time that numpy takes for a list
            packed = np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), dtype=np.int32)
            if packed.min() >= 0:
                return packed
    numbers = np.asarray(tokens)
    if not numbers.ndim:
        raise ValueError(
            f"tokens: the ids of the tokens, a flat list of integers, got {tokens!r}. Items for a "
            "number of tokens are allocated by extend."
        )
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"tokens: a flat list of integers, got {numbers.dtype}{numbers.shape}.")
    outside = numbers.astype(np.int64, copy=False) >> 31 if numbers.size else numbers
    if outside.any():
        raise ValueError(f"tokens: 0 to 2**31 - 1, got {numbers[outside != 0][0]}.")
    return numbers.astype(np.int32)


def _key(data: bytes) -> PrefixKey:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def _media_key(before: PrefixKey, spans: list[bytes], tokens: bytes) -> PrefixKey:
    # a hash of its own, in which spans are counted: no tokens are what spans and tokens are
    data = b"".join([before, struct.pack("<q", len(spans)), *spans, tokens])
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"media").digest()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture, video or sound in a prompt. `digest`: 32 bytes, the same only where all is the
    same that the state of `positions` depends on beside the tokens.
    """

    positions: range
    digest: bytes

    def __post_init__(self) -> None:
        positions = self.positions
        if positions.step != 1 or not 0 <= positions.start < positions.stop:
            raise ValueError(f"positions of media: from 0 on, one at least, got {positions}.")
        if len(self.digest) != KEY_BYTES:
            raise ValueError(f"digest of media: {KEY_BYTES} bytes, got {len(self.digest)}.")


Media = Sequence[MediaSpan]


class Chain:
    """The first tokens of a request, whose state is written, and the keys of pages of `page`.
    `media` are those of all tokens that it will have.
    """

    __slots__ = ("_keys", "_spans", "_tokens", "media", "num_tokens", "page", "salt")

    def __init__(self, page: int, salt: str = "", media: Media = ()) -> None:
        self.page, self.salt, self.media = page, salt, tuple(media)
        self._spans = _spans_of_pages(page, self.media)
        self.num_tokens = 0
        # both may go on behind num_tokens: a prompt is hashed once, when it is looked up
        self._tokens: Tokens = np.empty(0, dtype=np.int32)
        self._keys = [_key(salt.encode())]  # of 0, 1, ... pages

    @property
    def pages(self) -> int:
        """Whole pages of the tokens."""
        return self.num_tokens // self.page

    @property
    def keys(self) -> list[PrefixKey]:
        """The keys `[pages]` of the prefixes that end with each page."""
        return self._keys[1 : self.pages + 1]

    @property
    def tokens(self) -> Tokens:
        """The tokens, `[num_tokens]`."""
        return self._tokens[: self.num_tokens]

    def append(self, tokens: Tokens) -> None:
        """Adds tokens; hashes the pages that they fill."""
        start = self.num_tokens
        self.num_tokens = stop = start + tokens.size
        hashed_tokens = self._tokens[start:stop]
        if hashed_tokens.size and np.array_equal(hashed_tokens, tokens[: hashed_tokens.size]):
            start, tokens = start + hashed_tokens.size, tokens[hashed_tokens.size :]
        if tokens.size:
            self._tokens = np.concatenate([self._tokens[:start], tokens])
            del self._keys[start // self.page + 1 :]
        hashed, step = (len(self._keys) - 1) * self.page, 4 * self.page
        fresh = self._tokens[hashed : self.pages * self.page].astype("<i4").tobytes()
        for offset in range(0, len(fresh), step):
            before, more = self._keys[-1], fresh[offset : offset + step]
            spans = self._spans.get(len(self._keys) - 1)
            self._keys.append(
                _key(before + more) if spans is None else _media_key(before, spans, more)
            )

    def truncate(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        self.num_tokens = min(tokens, self.num_tokens)

    def copy(self) -> Chain:
        """A chain of the same tokens that grows by itself."""
        chain = copy(self)
        chain._keys = [*self._keys]
        return chain


def _spans_of_pages(page: int, media: Media) -> dict[int, list[bytes]]:
    """By number of a page, what its key says of the media in it."""
    spans: dict[int, list[bytes]] = {}
    order = sorted((span.positions.start, span.positions.stop, span.digest) for span in media)
    for start, stop, digest in order:
        for number in range(start // page, -(-stop // page)):
            span = struct.pack("<qq", start - number * page, stop - start) + digest
            spans.setdefault(number, []).append(span)
    return spans
