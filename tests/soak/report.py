"""What a soak run came to, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.soak.slices import Slice, Trend

MIB = 1 << 20


@dataclass
class Ended:
    """A slice that has ended: what its processes held, and what went wrong, if anything did."""

    slice: Slice
    problem: str = ""
    trends: list[Trend] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        grown = [
            f"{t.process}: {t.what} grew from {_number(t, t.before)} to {_number(t, t.after)}, by "
            f"more than {_number(t, t.limit)}"
            for t in self.trends
            if not t.flat
        ]
        return [f"{self.slice.name}: {what}" for what in (self.problem, *grown) if what]


@dataclass
class Report:
    """A run, whole or `interrupted`. It passed if it ran to its end and nothing went wrong."""

    seed: int
    minutes: float
    slices: list[Ended] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        return [sentence for ended in self.slices for sentence in ended.failures]

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, and nothing went wrong."""
        return bool(self.slices) and not self.interrupted and not self.failures

    def write(self, folder: Path) -> None:
        """Writes `soak.json`, with all samples, and `soak.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        slices = [
            {
                "engine": ended.slice.engine,
                "family": ended.slice.family,
                "seconds": ended.slice.seconds,
                "rounds": ended.slice.rounds,
                "rooms": ended.slice.rooms,
                "prefix": ended.slice.prefix,
                "late": ended.slice.late,
                "failures": ended.failures,
                "trends": [{**asdict(trend), "flat": trend.flat} for trend in ended.trends],
                "samples": {
                    name: [asdict(sample) for sample in series]
                    for name, series in ended.slice.samples.items()
                },
            }
            for ended in self.slices
        ]
        document = {"format": "kvpool-soak-1", "passed": self.passed, "seed": self.seed}
        document |= {"minutes": self.minutes, "interrupted": self.interrupted, "slices": slices}
        (folder / "soak.json").write_text(json.dumps(document, indent=1) + "\n")
        (folder / "soak.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> Iterator[str]:
        word = "interrupted" if self.interrupted else "passed" if self.passed else "failed"
        yield f"Soak of {self.minutes:g} minutes, seed {self.seed}: {word}.\n"
        yield from (f"- {sentence}" for sentence in self.failures)
        yield "\n| engine, pools | rounds | rooms, succeeded | failed | reused prefixes | late |"
        yield "|---|--:|--:|--:|--:|--:|"
        for ended in self.slices:
            part = ended.slice
            numbers = part.rounds.total(), part.rooms["succeeded"], part.rooms["failed"]
            cells = *map("{:,}".format, (*numbers, part.prefix["hits"], part.late)), ""
            yield f"| {part.name} | " + " | ".join(cells).rstrip()
        yield "\nMedians in the second and the last quarter of each slice:\n"
        yield "| engine, pools | process | memory, MiB | files | threads | items held |"
        yield "|---|---|--:|--:|--:|--:|"
        for ended in self.slices:
            for process in dict.fromkeys(trend.process for trend in ended.trends):
                cells = [_change(trend) for trend in ended.trends if trend.process == process]
                yield f"| {ended.slice.name} | {process} | {' | '.join(cells)} |"


def _change(trend: Trend) -> str:
    before, after = _number(trend, trend.before, ""), _number(trend, trend.after, "")
    return f"{before}, {after}" if trend.flat else f"**{before}, {after}**"


def _number(trend: Trend, value: float, unit: str = " MiB") -> str:
    return f"{value / MIB:.1f}{unit}" if trend.what == "memory" else f"{value:g}"
