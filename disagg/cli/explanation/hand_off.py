"""The plans of a hand-off to every decode rank, and what each rank sends and receives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from disagg.cli.explanation.sides import Side
from disagg.plan import IncompatibleLayouts, Reason, TransferPlan
from disagg.plan.cache import PlanCache
from disagg.plan.explain import Explanation, explain_routes
from kvpool.layout.sentences import by_layers

BITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class HandOff:
    """A request of `tokens` tokens from all ranks of prefill to each of decode."""

    prefill: Side
    decode: Side
    tokens: int

    @cached_property
    def outcomes(self) -> list[TransferPlan | IncompatibleLayouts]:
        """Of each decode rank its plan, or why there is none."""
        cache, outcomes = PlanCache(), list[TransferPlan | IncompatibleLayouts]()
        for rank in self.decode.ranks:
            try:
                outcomes.append(cache.plan(self.prefill.layouts, rank.layout))
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
            for source in plan.contributors():
                routes = [route for route in plan.routes if route.source == source]
                explanation = explain_routes(plan.sources, plan.dest, routes, self.tokens)
                sent[source] += explanation.nbytes
        return sent

    def refusals(self) -> list[tuple[str, str, str]]:
        """Reasons why decode ranks cannot be filled: prefill ranks, decode ranks, sentence. A
        reason that no prefill rank is about names the whole side.
        """
        refused: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for number, error in enumerate(self.outcomes):
            if isinstance(error, IncompatibleLayouts):
                by_sources: dict[tuple[int, ...], list[Reason]] = {}
                for reason in error.reasons:
                    by_sources.setdefault(reason.sources, []).append(reason)
                for sources, reasons in by_sources.items():
                    keyed = (((r.owner, r.layer, r.role), f": {r.sentence}") for r in reasons)
                    for line in by_layers(keyed):
                        refused.setdefault((sources, line), []).append(number)
        every = range(len(self.prefill.ranks))
        return [
            (self.prefill.words(sources or every), self.decode.words(numbers), line)
            for (sources, line), numbers in refused.items()
        ]


def parse_link(text: str) -> float:
    """Bytes a second of `400Gb`, `400 Gb/s`, `400Gbps` (bits) or `50GB/s` (bytes)."""
    form = r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT])(b|bit|B)(?:/s|ps)?"
    match = re.fullmatch(form, text.strip())
    rate = float(match[1]) * BITS[match[2]] / (1 if match[3] == "B" else 8) if match else 0.0
    if rate <= 0:
        raise ValueError(
            f"--link {text!r}: bits a second such as 400Gb (kb, Mb, Gb, Tb), or bytes such as 50GB."
        )
    return rate
