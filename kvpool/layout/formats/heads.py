"""Which heads of the model a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.layout.template import Repeat, Template


class Heads(NamedTuple):
    """`size` heads, of `total` in the model, from number `start` on."""

    start: int
    size: int
    total: int

    def of(self, inside: Template) -> Repeat:
        """`inside` for each head."""
        return Repeat("head", self.size, inside, self.start, self.total)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the sharded axes a pool holds: `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of the steps held, of `total`; with fewer steps than parts, several parts
        hold the same step: rank 3 of 8 holds head 1 of 4.
        """
        if total % self.size == 0:
            return self.rank * (total // self.size), total // self.size
        if self.size % total == 0:
            return self.rank // (self.size // total), 1
        raise ValueError(
            f"shard: {total} heads cannot be split over {self.size} ranks. One must divide the "
            "other."
        )

    def heads(self, total: int) -> Heads:
        """The heads held, of `total`."""
        start, size = self.of(total)
        return Heads(start, size, total)
