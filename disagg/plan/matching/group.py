"""The decode ranks that read each request together, and which of them asks which source rank.

Every member works out the whole table for itself, from the layouts of all: nothing is exchanged for
it, and all come to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.plan.matching.match import Holders, Part, elect
from kvpool.layout import PoolLayout, need_layouts


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
        need_layouts(
            self.layouts or None, "Group(layouts, member): `layouts` are those of all members."
        )
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


def share_out(
    overlaps: Sequence[Sequence[Part]], member: int, sources: int
) -> tuple[tuple[Part, ...], dict[int, int]]:
    """What one of the members whose destinations have these `overlaps` reads, and which source
    ranks it asks for each request, each with how many members ask that rank.

    Members that read from the same replicas take them in turn. A source rank of which nothing is
    read is asked by member `rank % members`: it must learn that nobody reads it, too. A member that
    would ask no rank asks rank `member % ranks`: how its rooms end is told by those that it asks.
    """
    readers: dict[Holders, list[int]] = {}
    for number, wanted in enumerate(overlaps):
        for holders in dict.fromkeys(overlap.holders for overlap in wanted):
            readers.setdefault(holders, []).append(number)
    turns: list[dict[Holders, Holders]] = [{} for _ in overlaps]
    for holders, numbers in readers.items():
        for place, number in enumerate(numbers):
            # each replica is read by as few members as can be: the second of two members reads
            # from ranks 2 and 3 of four
            low, high = (n * len(holders) // len(numbers) for n in (place, place + 1))
            turns[number][holders] = holders[low : max(high, low + 1)]
    parts = [tuple(elect(wanted, turn)) for wanted, turn in zip(overlaps, turns)]
    asked = [{part.source for part in read} for read in parts]
    for idle in set(range(sources)).difference(*asked):
        asked[idle % len(asked)].add(idle)
    for number, ranks in enumerate(asked):
        if not ranks:
            ranks.add(number % sources)
    askers = Counter(source for ranks in asked for source in ranks)
    return parts[member], {source: askers[source] for source in sorted(asked[member])}
