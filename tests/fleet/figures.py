"""What a simulated fleet did, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.fleet.memory import Memory
from tests.fleet.network import ABOUT_ROOMS
from tests.fleet.spec import Spec


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. `seconds` are of virtual time, of which new rooms began in the first `busy_seconds`;
    `cpu_seconds` of this machine's processor. `parts` count rooms of ranks by side and end,
    `failures` those that failed by side and kind; `sent` and `nbytes` are messages by type; `links`
    counts the pairs of a decode rank and a prefill rank that are connected in the end.
    """

    spec: Spec
    seconds: float
    busy_seconds: float
    cpu_seconds: float
    failed: int
    died: int
    parts: Mapping[str, int]
    failures: Mapping[str, int]
    room_seconds: tuple[float, float]
    """Median, and 99 of 100."""
    sent: Mapping[str, int]
    nbytes: Mapping[str, int]
    lost: int
    links: int
    peaks: Mapping[str, Mapping[str, int]]
    memory: Memory
    plans: tuple[int, int]
    """Those that were known, and those that were made."""
    plan_seconds: float
    """Of this machine."""
    trace: str
    broken: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return self.spec.prefill + self.spec.decode

    def grown(self, what: str) -> int:
        return self.ranks if what in ("fleet", "both") else int(getattr(self.spec, what))

    @property
    def rooms_per_second(self) -> float:
        """In virtual time, while new rooms began: what ended then makes room for those."""
        first = self.spec.in_flight * self.spec.engines[1]
        if self.spec.rooms <= first:
            return self.spec.rooms / self.seconds
        return (self.spec.rooms - first) / self.busy_seconds

    @property
    def room_messages(self) -> float:
        """Messages that name a room, for each room."""
        return sum(n for tag, n in self.sent.items() if tag in ABOUT_ROOMS) / self.spec.rooms

    @property
    def room_bytes(self) -> float:
        """Bytes of these messages, for each room."""
        return sum(n for tag, n in self.nbytes.items() if tag in ABOUT_ROOMS) / self.spec.rooms

    @property
    def link_messages(self) -> float:
        """Messages that name no room, for each room: hellos, pings and their answers."""
        return sum(n for tag, n in self.sent.items() if tag not in ABOUT_ROOMS) / self.spec.rooms

    def largest(self, queue: str) -> int:
        """The largest such queue of any rank: see Peaks."""
        return max(peaks[queue] for peaks in self.peaks.values())

    def as_dict(self) -> dict[str, Any]:
        derived = "ranks", "rooms_per_second", "room_messages", "room_bytes", "link_messages"
        return asdict(self) | {name: getattr(self, name) for name in derived}


def quantile(values: Sequence[float], part: float) -> float:
    """The value below or at which `part` of the values are."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of log y over log x, by least squares: 1 is linear."""
    if len(xs) < 2 or min(*xs, *ys) <= 0:
        return math.nan
    us, vs = [math.log(x) for x in xs], [math.log(y) for y in ys]
    u, v = sum(us) / len(us), sum(vs) / len(vs)
    return sum((a - u) * (b - v) for a, b in zip(us, vs)) / sum((a - u) ** 2 for a in us)
