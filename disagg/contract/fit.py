"""Whether two engines can work together, and every reason against: what their endpoints would
answer one another, by the same comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from disagg.contract.contract import Contract
from disagg.contract.hand_off import HandOff, Side, SideRank
from disagg.plan import TransferPlan
from disagg.plan.cast.scales import scale_problems
from disagg.protocol.agreement import (
    NO_REGION,
    all_differences,
    common_protocol,
    engine_problems,
    protocol_problems,
    unsaid_conventions,
)
from kvpool.layout.text import ranges


@dataclass(frozen=True, slots=True)
class Objection:
    """Why the two cannot work together: what it is `about` (side, ranks, protocol, engine,
    conventions or layout), the ranks of both sides in words, and the reason.
    """

    about: str
    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Of two contracts, under `names`, their sources, for a request of `tokens` tokens."""

    prefill: Contract
    decode: Contract
    names: tuple[str, str]
    tokens: int

    @cached_property
    def hand_off(self) -> HandOff:
        """What would travel; its `refusals` are those of layouts."""
        prefill, decode = (
            Side(side, _ranks(name, contract), files=True)
            for side, name, contract in zip(
                ("prefill", "decode"), self.names, (self.prefill, self.decode)
            )
        )
        return HandOff(
            prefill=prefill,
            decode=decode,
            tokens=self.tokens,
            allow_missing=self.decode.allow_missing,
            cast=self.decode.cast,
        )

    def objections(self) -> list[Objection]:
        """All reasons against; none if the two can work together."""
        prefill, decode = self.hand_off.prefill.words(), self.hand_off.decode.words()
        whole = [
            Objection(subject, prefill, decode, reason) for subject, reason in self._of_engines()
        ]
        return [
            *whole,
            *self._of_conventions(),
            *(
                Objection("layout", sources, dests, reason)
                for sources, dests, reason in self._of_layouts()
            ),
        ]

    def _of_engines(self) -> Iterator[tuple[str, str]]:
        for side, contract in (("prefill", self.prefill), ("decode", self.decode)):
            if side not in contract.serves:
                serves = " and ".join(contract.serves)
                yield "side", f"{side} serves {serves} only. Start it for {side}."
            if contract.missing:
                yield (
                    "ranks",
                    f"{side} has {contract.size} ranks, and its contract lacks "
                    f"{ranges(contract.missing)}. Give those of all ranks, separated by commas.",
                )
        for reason in protocol_problems(self.prefill, self.decode):
            yield "protocol", reason
        for reason in engine_problems(self.prefill, self.decode):
            yield "engine", reason
        if (number := common_protocol(self.prefill, self.decode)) is not None:
            for contract in (self.prefill, self.decode):
                names = {name for rank in contract.ranks for name in rank.conventions}
                for reason in unsaid_conventions(dict.fromkeys(names, ""), number):
                    yield "conventions", reason

    def _of_conventions(self) -> Iterator[Objection]:
        """Each difference once, with the decode ranks that it is of."""
        numbers: dict[str, list[int]] = {}
        for number, rank in enumerate(self.decode.ranks):
            sources = (source.conventions for source in self.prefill.ranks)
            for reason in all_differences(sources, rank.conventions):
                numbers.setdefault(reason, []).append(number)
            outcome = self.hand_off.outcomes[number]
            if isinstance(outcome, TransferPlan) and outcome.cast is not None:
                source_conventions = [source.conventions for source in self.prefill.ranks]
                for reason in scale_problems(
                    outcome.cast.arrival, source_conventions, rank.conventions
                ):
                    numbers.setdefault(reason, []).append(number)
        sides = self.hand_off
        for reason, ranks in numbers.items():
            prefill, decode = sides.prefill.words(), sides.decode.words(ranks)
            yield Objection("conventions", prefill, decode, reason)

    def _of_layouts(self) -> Iterator[tuple[str, str, str]]:
        sides = self.hand_off
        for number, rank in enumerate(self.decode.ranks):
            if not rank.layout.regions:
                yield sides.prefill.words(), sides.decode.words([number]), NO_REGION
        yield from sides.refusals()


def _ranks(name: str, contract: Contract) -> tuple[SideRank, ...]:
    alone = contract.size == 1
    return tuple(
        SideRank(name, None if alone else rank.number, rank.layout) for rank in contract.ranks
    )
