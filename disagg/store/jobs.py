"""Lookups and reads of a store: under way, and ended. Each ends once, and is counted then."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from disagg.store.lookup import Hit
from disagg.store.stats import Outcomes
from kvpool.layout import RequestAddress

LOOK_SECONDS = 0.05
"""Between two looks of `wait` at what is late."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A lookup or read has ended. `hit`, of a lookup, is what there is; `failure` says why a read
    has failed, or a lookup found nothing because the floor did not answer.
    """

    job: int
    what: Literal["lookup", "read"]
    hit: Hit
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class LookupJob:
    """A lookup of a prefix of so many tokens."""

    number: int
    tokens: int
    deadline: float


@dataclass(frozen=True, slots=True)
class DeferredAddress:
    """The block table of a request's first `num_tokens` positions, to be read to. A thread of the
    store makes it: to check a long one takes longer than a scheduler has.
    """

    num_tokens: int
    make: Callable[[], RequestAddress]


@dataclass(kw_only=True)
class ReadJob:
    """A read of positions `tokens` of a prefix, whose end is the end of the request that `table`
    is of. Once it has ended nothing of it is written any more.
    """

    number: int
    table: RequestAddress | DeferredAddress
    tokens: range
    deadline: float
    left: int = 0
    """Objects that are not read yet."""
    nbytes: int = 0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while something is written to the pool."""

    @cached_property
    def address(self) -> RequestAddress:
        """The block table. Raises ValueError where that lists an item twice."""
        return self.table if isinstance(self.table, RequestAddress) else self.table.make()


class Jobs:
    """Of one store. Any thread may call."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        """Of all below; its waiters are told of what has ended."""
        self._under_way: dict[int, LookupJob | ReadJob] = {}
        self._ended: dict[int, EndedJob] = {}

    def lookup(self, tokens: int, deadline: float) -> LookupJob:
        """Begins one."""
        job = LookupJob(next(self._numbers), tokens, deadline)
        with self._changed:
            self._under_way[job.number] = job
        return job

    def read(
        self, table: RequestAddress | DeferredAddress, tokens: range, deadline: float
    ) -> ReadJob:
        """Begins one."""
        number = next(self._numbers)
        job = ReadJob(number=number, table=table, tokens=tokens, deadline=deadline)
        with self._changed:
            self._under_way[number] = job
        return job

    def is_under_way(self, number: int) -> bool:
        return number in self._under_way

    def end(self, ended: EndedJob, outcome: str, size: int, why: str = "") -> bool:
        """Ends a job, and counts its outcome; False if it has ended before."""
        with self._changed:
            if self._under_way.pop(ended.job, None) is None:
                return False
            self._outcomes.count(outcome, size, why)
            self._ended[ended.job] = ended
            self._changed.notify_all()
        return True

    def abort(self, number: int) -> None:
        """Ends a read without a report: when this returns, nothing of it is written any more."""
        with self._changed:
            job = self._under_way.get(number)
            if not isinstance(job, ReadJob):
                return
            del self._under_way[number]
        with job.lock:
            job.ended = True
        self._outcomes.count("aborted", len(job.tokens))

    def abort_reads(self) -> None:
        for number in list(self._under_way):
            self.abort(number)

    def late(self, now: float) -> list[LookupJob | ReadJob]:
        """Those that should have ended by now."""
        with self._changed:
            return [job for job in self._under_way.values() if job.deadline < now]

    def take_ended(self) -> list[EndedJob]:
        """Those that have ended since the last call."""
        with self._changed:
            ended, self._ended = list(self._ended.values()), {}
        return ended

    def wait(self, number: int, end_late: Callable[[], None]) -> EndedJob:
        """How a job ends, which `take_ended` then does not tell. Raises ValueError for a job that
        is neither under way nor told of.
        """
        while True:
            end_late()
            with self._changed:
                if number not in self._under_way and number not in self._ended:
                    raise ValueError(f"job {number}: none that is under way here.")
                if self._changed.wait_for(lambda: number in self._ended, LOOK_SECONDS):
                    return self._ended.pop(number)
