"""The ranks of two sides, and what travels between them or why nothing does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.plan.bind import run_lengths
from disagg.plan.cache import PlanCache
from disagg.plan.explain import Explanation
from kvpool.layout import Key, PoolLayout
from kvpool.layout.text import by_layers, ranges


@dataclass(frozen=True, slots=True)
class SideRank:
    """A rank's layout, and the file or model that it is of; `number` counts a model's ranks, those
    of a stage after one another. None for the only one.
    """

    of: str
    number: int | None
    layout: PoolLayout


@dataclass(frozen=True, slots=True)
class Side:
    """`name` is prefill or decode; `files`: all ranks are of layout files."""

    name: str
    ranks: tuple[SideRank, ...]
    files: bool

    def words(self, numbers: Iterable[int] | None = None) -> str:
        """Ranks by number, or all: `prefill a.json, b.json`, `decode deepseek_v3 ranks 0-3`."""
        ranks_of: dict[str, list[int]] = {}
        for number in range(len(self.ranks)) if numbers is None else numbers:
            rank = self.ranks[number]
            ranks_of.setdefault(rank.of, []).extend([] if rank.number is None else [rank.number])
        words = [
            f"{of} rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}" if ranks else of
            for of, ranks in ranks_of.items()
        ]
        return " ".join([self.name, ", ".join(words)]).strip()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends or receives: how many runs of each number of bytes, if no two pages of the
    request are adjacent.
    """

    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def runs(self) -> int:
        return self.lengths.total()

    @property
    def nbytes(self) -> int:
        return sum(nbytes * number for nbytes, number in self.lengths.items())

    @property
    def mean(self) -> float:
        """Bytes a run."""
        return self.nbytes / self.runs if self.runs else 0.0

    @property
    def median(self) -> int:
        """Bytes of the run in the middle; of two the shorter."""
        rest = (self.runs + 1) // 2
        for nbytes, number in sorted(self.lengths.items()):
            rest -= number
            if rest <= 0:
                return nbytes
        return 0


@dataclass(frozen=True)
class HandOff:
    """A request of `tokens` tokens from all ranks of prefill to each of decode. `allow_missing`:
    owners or roles that prefill may lack. `cast`: roles that decode converts.
    """

    prefill: Side
    decode: Side
    tokens: int
    allow_missing: Collection[str] = ()
    cast: bool | Collection[str] = False

    @cached_property
    def outcomes(self) -> list[TransferPlan | IncompatibleLayouts]:
        """Of each decode rank its plan, or why there is none."""
        cache = PlanCache(self.allow_missing, cast=self.cast)
        outcomes = list[TransferPlan | IncompatibleLayouts]()
        sources = [rank.layout for rank in self.prefill.ranks]
        for rank in self.decode.ranks:
            try:
                outcomes.append(cache.plan(sources, rank.layout))
            except IncompatibleLayouts as error:
                outcomes.append(error)
        return outcomes

    @property
    def plans(self) -> dict[int, TransferPlan]:
        """By decode rank."""
        return {n: plan for n, plan in enumerate(self.outcomes) if isinstance(plan, TransferPlan)}

    @cached_property
    def explained(self) -> list[tuple[list[int], Explanation]]:
        """Each explanation that differs, and the decode ranks that it is of."""
        alike: dict[Explanation, list[int]] = {}
        for number, plan in self.plans.items():
            alike.setdefault(plan.explain(self.tokens), []).append(number)
        return [(numbers, explanation) for explanation, numbers in alike.items()]

    def received(self) -> dict[int, int]:
        """Bytes by decode rank that can be filled."""
        return {number: traffic.nbytes for number, traffic in self.received_runs().items()}

    def sent(self) -> dict[int, int]:
        """Bytes by prefill rank, to all decode ranks."""
        return {number: traffic.nbytes for number, traffic in self.sent_runs().items()}

    def received_runs(self) -> dict[int, Traffic]:
        """By decode rank that can be filled."""
        return self._traffic[1]

    def sent_runs(self) -> dict[int, Traffic]:
        """By prefill rank, to all decode ranks."""
        return self._traffic[0]

    @cached_property
    def _traffic(self) -> tuple[dict[int, Traffic], dict[int, Traffic]]:
        sent = {number: Traffic() for number in range(len(self.prefill.ranks))}
        received = {number: Traffic() for number in self.plans}
        for number, plan in self.plans.items():
            for part in (plan, *([plan.cast.plan] if plan.cast else [])):
                for route in part.routes:
                    lengths = run_lengths(route, self.tokens)
                    sent[route.source].lengths.update(lengths)
                    received[number].lengths.update(lengths)
        return sent, received

    def refusals(self) -> list[tuple[str, str, str]]:
        """Prefill ranks (or the whole side), decode ranks, and why they cannot be filled."""
        refused: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for number, error in enumerate(self.outcomes):
            if isinstance(error, IncompatibleLayouts):
                by_sources: dict[tuple[int, ...], list[tuple[Key, str]]] = {}
                for r in error.reasons:
                    keyed = (r.owner, r.layer, r.role), f": {r.sentence}"
                    by_sources.setdefault(r.sources, []).append(keyed)
                for sources, reasons in by_sources.items():
                    for line in by_layers(reasons):
                        refused.setdefault((sources, line), []).append(number)
        return [
            (self.prefill.words(sources or None), self.decode.words(numbers), line)
            for (sources, line), numbers in refused.items()
        ]
