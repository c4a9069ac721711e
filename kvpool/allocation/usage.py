"""How much of an allocator's pools is in use."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.allocation.prefix_cache import PrefixStats
from kvpool.layout.text import counted


class Usage(NamedTuple):
    """Free and used items by id list, or of its block pool (a shared item counts once, reserved
    ones not), live requests, and the counts of the prefix cache, if there is one.
    """

    free: dict[str, int]
    used: dict[str, int]
    requests: int
    prefix: PrefixStats | None = None

    def words(self) -> str:
        """`1 request, 7 of 16 items of kv in use`."""
        lists = (
            f"{count:,} of {count + self.free[name]:,} items of {name} in use"
            for name, count in self.used.items()
        )
        return ", ".join([counted(self.requests, "request"), *lists])
