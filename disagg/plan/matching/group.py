"""The decode ranks that read each request together, and which of them asks which source rank.

Every member works out the whole table for itself, from the layouts of all: nothing is exchanged for
it, and all come to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.plan.matching.match import Holders, Overlap, Part, Turn, elect
from kvpool.layout import PoolLayout


@dataclass(frozen=True, slots=True)
class Group:
    """The layouts of all decode ranks that read each request, and which of them (`member`) this one
    is. Pointers and generations of the others mean nothing here.

    All members must be given the same layouts in the same order and the same `allow_missing`, and
    must see the same layouts of prefill: endpoints ask prefill for the owners and roles of all
    members. Members may hold different ones, as stages do whose layers are of different kinds.
    """

    layouts: tuple[PoolLayout, ...]
    member: int

    def __post_init__(self) -> None:
        if not self.layouts or any(not isinstance(each, PoolLayout) for each in self.layouts):
            raise TypeError("Group(layouts, member): `layouts` are those of all members.")
        object.__setattr__(self, "layouts", tuple(self.layouts))
        if not 0 <= self.member < len(self.layouts):
            raise ValueError(
                f"group: member {self.member} of {len(self.layouts)} layouts: give a number from 0 "
                f"to {len(self.layouts) - 1}."
            )

    def check(self, layout: PoolLayout) -> None:
        """Raises ValueError if `layout` is not like this member's."""
        if layout.fingerprint() != self.layouts[self.member].fingerprint():
            raise ValueError(
                f"group: layout {self.member} is not like that of member {self.member}, which this "
                "rank is. Give the layouts of all members, each at its own number."
            )

    @property
    def shape(self) -> tuple[int, tuple[str, ...]]:
        """Equal for groups that differ in pointers only."""
        return self.member, tuple([layout.fingerprint() for layout in self.layouts])


class Share(NamedTuple):
    """What one member reads (`parts`), and which source ranks it asks for each request, each with
    how many members ask that rank.
    """

    parts: tuple[Part, ...]
    asks: dict[int, int]


def share_out(overlaps: Sequence[Sequence[Overlap]], member: int, sources: int) -> Share:
    """The share of one of the members whose destinations have these `overlaps`.

    Members that read from the same replicas take them in turn. A source rank of which nothing is
    read is asked by member `rank % members`: it must learn that nobody reads it, too. A member that
    would ask no rank asks rank `member % ranks`: how its rooms end is told by those that it asks.
    """
    readers: dict[Holders, list[int]] = {}
    for number, mine in enumerate(overlaps):
        for holders in dict.fromkeys(each.holders for each in mine):
            readers.setdefault(holders, []).append(number)
    turns: list[dict[Holders, Turn]] = [{} for _ in overlaps]
    for holders, numbers in readers.items():
        for place, number in enumerate(numbers):
            turns[number][holders] = Turn(place, len(numbers))
    parts = [tuple(elect(mine, turn)) for mine, turn in zip(overlaps, turns)]
    asked = [{part.source for part in each} for each in parts]
    for idle in set(range(sources)).difference(*asked):
        asked[idle % len(asked)].add(idle)
    for number, each in enumerate(asked):
        if not each:
            each.add(number % sources)
    askers = Counter(source for each in asked for source in each)
    return Share(parts[member], {source: askers[source] for source in sorted(asked[member])})
