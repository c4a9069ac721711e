"""Which chunks a store does without: those that were used least recently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.store.floors.base import Floor
from disagg.store.upkeep.tree import Chunk, Forest, Tell, untold

USED_SECONDS = 60.0
"""Uses that are less apart are equal: floors note them to the minute, and chunks of a prefix are
read one after the other."""
REMOVED_AT_ONCE = 64
"""Chunks."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Chunks to remove, in this order, and how many bytes and chunks then are left."""

    chunks: tuple[Chunk, ...]
    kept_chunks: int
    kept_bytes: int

    @property
    def objects(self) -> int:
        return sum(len(chunk.names) for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def last_uses(forest: Forest) -> dict[Chunk, float]:
    """When each chunk, or one that follows it, was last used: without a chunk, those behind it are
    not found. 0 where the floor does not know.
    """
    uses = {chunk: chunk.used or 0.0 for chunk in (*forest.chunks, *forest.lost)}
    for chunk in reversed(forest.chunks):  # those that follow first
        uses[chunk] = max([uses[chunk], *(uses[child] for child in chunk.children)])
    return uses


def choose(
    forest: Forest, *, keep: int | None = None, unused_since: float | None = None
) -> Removal:
    """What to remove: chunks without a use since `unused_since`, then the least recently
    used until at most `keep` bytes are left. Of those used in the same minute the deepest go first,
    and never one before those that follow it. Raises ValueError for `unused_since` where it is not
    known when objects were used.
    """
    uses = last_uses(forest)
    if unused_since is not None and not all(uses.values()):
        raise ValueError("this floor does not tell when objects were used. Leave --older out.")
    left = sum(chunk.nbytes for chunk in uses)
    removed: list[Chunk] = []
    for chunk in sorted(uses, key=lambda one: _order(one, uses[one])):
        old = unused_since is not None and _minute(uses[chunk]) < _minute(unused_since)
        if not old and (keep is None or left <= keep):
            break
        removed.append(chunk)
        left -= chunk.nbytes
    return Removal(tuple(removed), len(uses) - len(removed), left)


def remove(floor: Floor, chunks: Sequence[Chunk], tell: Tell = untold) -> None:
    """Removes all objects of chunks, in order. Raises FloorError."""
    for first in range(0, len(chunks), REMOVED_AT_ONCE):
        batch = chunks[first : first + REMOVED_AT_ONCE]
        floor.delete([*_names(batch)])
        tell("removing", first + len(batch))


def _names(chunks: Sequence[Chunk]) -> Iterator[str]:
    for chunk in chunks:
        yield from chunk.names


def _order(chunk: Chunk, used: float) -> tuple[float, float]:
    # what has no head that can be read is of no use: among equals it goes first
    depth = float("inf") if chunk.number is None else chunk.number
    return _minute(used), -depth


def _minute(seconds: float) -> float:
    return seconds // USED_SECONDS
