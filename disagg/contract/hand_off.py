"""The ranks of two sides, and what travels between them or why nothing does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.plan.cache import PlanCache
from disagg.plan.explain import Explanation, explain_routes
from kvpool.layout import Key, PoolLayout
from kvpool.layout.sentences import by_layers, ranges


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
        """Bytes by decode rank."""
        return {n: explanation.nbytes for ranks, explanation in self.explained for n in ranks}

    def sent(self) -> dict[int, int]:
        """Bytes by prefill rank, to all decode ranks."""
        sent = dict.fromkeys(range(len(self.prefill.ranks)), 0)
        for plan in self.plans.values():
            for part in (plan, *([plan.cast.plan] if plan.cast else [])):
                for source in part.contributors():
                    routes = [route for route in part.routes if route.source == source]
                    explanation = explain_routes(part.sources, part.dest, routes, self.tokens)
                    sent[source] += explanation.nbytes
        return sent

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
