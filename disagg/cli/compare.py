"""What another order, page size or placement would change: the runs of each, the best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from os.path import isfile
from typing import TYPE_CHECKING, Any

from disagg.cli.sides import CHOICES, AskedSide, flag
from disagg.cli.wire import Busiest, LinkRates, milliseconds
from disagg.contract.hand_off import HandOff

if TYPE_CHECKING:
    from rich.table import Table

PAGE_SIZES = 16, 64, 256
"""Tried beside those of both sides."""
HEAD = ("alternative", "runs", "bytes/run", "median")


@dataclass(slots=True)
class Outcome:
    """What travels to and from the busiest ranks, and all options that lead to it; or why nothing
    does.
    """

    busiest: Busiest | None
    refusal: str = ""
    options: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """`--order=hnd, nhd:hnd; --page-size=16`."""
        values: dict[str, list[str]] = {}
        for name, equals, value in (option.partition("=") for option in self.options):
            values.setdefault(name + equals, []).append(value)
        return "; ".join(name + ", ".join(texts) for name, texts in values.items())

    def rank(self, link: LinkRates) -> tuple[float, int]:
        """Less is better."""
        if self.busiest is None:
            return float("inf"), 0
        return max(filter(None, self.seconds(link)), default=0.0), self.busiest.traffic.runs

    def seconds(self, link: LinkRates) -> tuple[float | None, float | None]:
        """Of the bytes and of the runs."""
        if self.busiest is None:
            return None, None
        traffic = self.busiest.traffic
        return link.byte_seconds(self.busiest.nbytes), link.run_seconds(traffic.runs)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Outcomes that differ, the best first; `asked` is that of the options as they were given."""

    outcomes: list[Outcome]
    asked: Outcome
    link: LinkRates
    tokens: int

    @classmethod
    def of(
        cls, prefill: AskedSide, decode: AskedSide, tokens: int, link: LinkRates
    ) -> Alternatives:
        """One thing changed at a time. Raises ValueError where neither side is of a model."""
        if not any(map(_values, (prefill, decode))):
            raise ValueError(
                "--compare: the sides are layout files, which have one order, page size and "
                "placement. Give a model config."
            )
        read, alike = cache(AskedSide.read), dict[object, Outcome]()
        for option, (first, second) in _alternatives(prefill, decode):
            try:
                outcome = _outcome(HandOff(read(first), read(second), tokens))
            except ValueError as error:
                outcome = Outcome(None, str(error))
            alike.setdefault(_figures(outcome), outcome).options.append(option)
        asked = next(iter(alike.values()))
        return cls(sorted(alike.values(), key=lambda o: o.rank(link)), asked, link, tokens)

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of a table, of which the first row is the head."""
        link, rows = self.link, list[tuple[str, ...]]()
        for outcome in self.outcomes:
            if (busiest := outcome.busiest) is not None:
                traffic, words = busiest.traffic, outcome.words
                sizes = f"{traffic.runs:,}", f"{traffic.mean:,.0f}", f"{traffic.median:,}"
                times = [milliseconds(time) for time in outcome.seconds(link) if time is not None]
                rows.append((words, *sizes, *times))
        heads = (("ms, bytes", link.bytes_per_second), ("ms, runs", link.runs_per_second))
        return [(*HEAD, *(head for head, rate in heads if rate is not None)), *rows]

    @property
    def title(self) -> str:
        return (
            f"one thing changed, for {self.tokens:,} tokens, on the rank with the most runs; "
            "best first"
        )

    def table(self) -> Table:
        """For the terminal."""
        from rich.markup import escape

        from kvpool.render.table import FittedTable

        (head, *sizes), *rows = self.rows()
        table = FittedTable(head, title=self.title)
        for name in sizes:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        return table

    def words(self) -> Iterator[str]:
        """Which of them makes runs longest, and what is refused."""
        longest = max(self.outcomes, key=lambda o: o.busiest.traffic.mean if o.busiest else -1)
        best, asked = longest.busiest, self.asked.busiest
        if best is not None and asked is not None:
            if best.traffic.mean <= asked.traffic.mean:
                yield "None of these makes runs longer."
            else:
                factor = best.traffic.mean / asked.traffic.mean
                yield f"{longest.words} makes runs {factor:,.3g} times as long."
        for outcome in self.outcomes:
            if outcome.busiest is None:
                yield f"refused: {outcome.words}: {outcome.refusal}"

    def as_dicts(self) -> list[dict[str, Any]]:
        """The JSON of each."""
        return [self._as_dict(outcome) for outcome in self.outcomes]

    def _as_dict(self, outcome: Outcome) -> dict[str, Any]:
        seconds, run_seconds = outcome.seconds(self.link)
        traffic = outcome.busiest and outcome.busiest.traffic
        return {
            "options": outcome.options,
            "runs": traffic and traffic.runs,
            "bytes": outcome.busiest and outcome.busiest.nbytes,
            "bytes_per_run": traffic and traffic.mean,
            "median": traffic and traffic.median,
            "seconds": seconds,
            "run_seconds": run_seconds,
            "refused": outcome.refusal or None,
        }


def _outcome(hand_off: HandOff) -> Outcome:
    refusals = [line for _, _, line in hand_off.refusals()]
    return Outcome(None, refusals[0]) if refusals else Outcome(Busiest.of(hand_off))


def _figures(outcome: Outcome) -> object:
    """What outcomes that are one row of the table have in common."""
    if outcome.busiest is None:
        return outcome.refusal
    return outcome.busiest.nbytes, tuple(sorted(outcome.busiest.traffic.lengths.items()))


def _alternatives(
    prefill: AskedSide, decode: AskedSide
) -> Iterator[tuple[str, tuple[AskedSide, AskedSide]]]:
    """What is asked, then one thing changed on either side or on both, each as it is written."""
    yield "as asked", (prefill, decode)
    asked = _values(prefill), _values(decode)
    for option in ("order", "page_size", "placement"):
        ours, theirs = (values.get(option) for values in asked)
        choices = CHOICES.get(option) or sorted({*PAGE_SIZES, *filter(None, (ours, theirs))})
        pairs = dict.fromkeys(
            pair for value in choices for pair in ((value, value), (value, theirs), (ours, value))
        )
        for first, second in pairs:
            # a side of layout files has nothing that may be changed
            first, second = ours and first, theirs and second
            if (first, second) != (ours, theirs):
                sides = _with(prefill, option, first), _with(decode, option, second)
                yield f"{flag(option)}={_written(first, second)}", sides


def _with(side: AskedSide, option: str, value: Any) -> AskedSide:
    return replace(side, split=replace(side.split, **{option: value})) if value else side


def _written(first: object, second: object) -> str:
    return str(first) if first == second else f"{first or ''}:{second or ''}"


def _values(side: AskedSide) -> dict[str, Any]:
    """What a side has now of all that may be changed; nothing if it is of layout files."""
    from kvpool.models import declare

    if any(map(isfile, side.whats)):
        return {}
    split = side.split
    return {
        "order": split.order or CHOICES["order"][0],
        "page_size": split.page_size or declare(side.whats[0]).page_size,
        "placement": split.placement or CHOICES["placement"][0],
    }
