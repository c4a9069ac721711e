"""Digests of rows that arrive in a layout of their own and are not kept there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from disagg.digest.cell_hash import Hashes, ReadCells
from disagg.digest.digest import Piece, digests
from kvpool.layout import Key, PoolLayout, RequestAddress
from kvpool.layout.grid import Ints


class _ArrivedEntries(NamedTuple):
    """Entries of a region, and their digests."""

    numbers: Ints
    hashes: Hashes


class ArrivedDigests:
    """Digests of what has arrived from one source rank, entry by entry."""

    def __init__(self) -> None:
        self._parts: dict[Key, list[_ArrivedEntries]] = {}

    def digest_arrived(
        self, layout: PoolLayout, address: RequestAddress, pieces: Iterable[Piece], read: ReadCells
    ) -> None:
        """Digests pieces that have arrived, of a request whose block table in the arrival this is.
        `read` reads cells of its buffers.
        """
        for piece in pieces:
            hashes = np.concatenate([*digests(layout, address, [piece], each=True, read=read)])
            self._parts.setdefault(piece.key, []).append(_ArrivedEntries(piece.numbers(), hashes))

    def with_others(
        self, layout: PoolLayout, address: RequestAddress, pieces: Sequence[Piece], each: bool
    ) -> Iterator[Hashes]:
        """As `digests`, of pieces that have arrived and of others that are in memory."""
        for piece in pieces:
            if piece.key in self._parts:
                yield self.hashes_of(piece, each)
            else:
                yield from digests(layout, address, [piece], each)

    def hashes_of(self, piece: Piece, each: bool) -> Hashes:
        """The digest of a piece, or with `each` that of every entry. Raises ValueError if some of
        its entries have not arrived.
        """
        parts = self._parts.get(piece.key, [])
        hash_by_entry: dict[int, int] = {}
        for numbers, hashes in parts:
            hash_by_entry.update(zip(numbers.tolist(), hashes.tolist()))
        try:
            values = [hash_by_entry[number] for number in piece.numbers().tolist()]
        except KeyError as missing:
            raise ValueError(f"{piece.key}: entry {missing} has not arrived.") from None
        hashes = np.array(values, dtype=np.uint64)
        return hashes if each else hashes.sum(keepdims=True)
