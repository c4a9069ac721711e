"""Figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvpool.render.text import human
from tests.fleet.figures import Figures, growth

WHAT = {
    "fleet": "ranks of the fleet",
    "prefill": "prefill ranks of each room, beside 4 of decode",
    "decode": "decode ranks of each room, beside 4 of prefill",
    "both": "ranks of each room, half of them prefill",
}
Column = tuple[str, Callable[[Figures], float], str]
COLUMNS: tuple[Column, ...] = (
    ("rooms/s", lambda run: run.rooms_per_second, "{:,.0f}"),
    ("messages a room", lambda run: run.room_messages, "{:,.1f}"),
    ("largest inbox", lambda run: run.largest("inbox"), "{:,.0f}"),
    ("open rooms", lambda run: run.largest("open"), "{:,.0f}"),
    ("bytes a decode peer", lambda run: run.memory.decode_peer, "{:,.0f}"),
    ("a room", lambda run: run.memory.decode_room, "{:,.0f}"),
    ("bytes a prefill peer", lambda run: run.memory.prefill_peer, "{:,.0f}"),
    ("a room", lambda run: run.memory.prefill_room, "{:,.0f}"),
)
"""Of a table of several runs."""


def one_table(run: Figures) -> Iterator[str]:
    spec, memory = run.spec, run.memory
    most, parts = run.peaks, ", ".join(f"{what} {n:,}" for what, n in run.parts.items())
    failures = ", ".join(f"{what} {n:,}" for what, n in run.failures.items())
    median, late = (1000 * seconds for seconds in run.room_seconds)
    links = run.link_messages * spec.rooms / run.seconds / max(1, run.links)
    prefill, decode = spec.engines
    rows = (
        ("fleet", f"{prefill:,} prefill engines of {spec.prefill_tp}, {decode:,} decode engines of "
         f"{spec.decode_tp}: {run.ranks:,} ranks, {run.links:,} connections"),
        ("rooms", f"{spec.rooms:,}, {run.failed:,} failed; {run.died:,} ranks died"),
        ("on ranks", parts),
        ("failures on ranks", failures or "none"),
        ("rooms a second", f"{run.rooms_per_second:,.1f}, virtual; all {run.seconds:,.1f} s"),
        ("a room takes", f"{median:,.1f} ms, 99 of 100 within {late:,.1f} ms"),
        ("messages a room", f"{run.room_messages:,.1f}, {human(int(run.room_bytes))}"),
        ("of connections", f"{links:.2f} messages a second and connection"),
        ("lost messages", f"{run.lost:,}"),
        *((f"most on a {side} rank", f"{most[side]['inbox']:,} messages waiting, "
           f"{most[side]['open']:,} rooms open, {most[side]['backlog']:,} waiting for pages")
          for side in ("prefill", "decode")),
        ("memory of a peer", f"{human(memory.prefill_peer)} on prefill, "
         f"{human(memory.decode_peer)} on decode"),
        ("memory of a room", f"{human(memory.prefill_room)} on prefill, "
         f"{human(memory.decode_room)} on decode"),
        ("plans", f"{run.plans[1]:,} made, {run.plans[0]:,} known: {run.plan_seconds:.2f} s here"),
        ("this machine", f"{run.cpu_seconds:,.1f} s of its processor"),
        ("trace", run.trace),
    )  # fmt: skip
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {words} |" for name, words in rows)


def growth_table(what: str, runs: Sequence[Figures]) -> Iterator[str]:
    """A row for each run, and how each figure grows with the ranks of what grows."""
    yield f"{WHAT[what]}:\n"
    yield " | ".join(("| ranks", "rooms", *(f"{name}" for name, _, _ in COLUMNS), "")).rstrip()
    yield "|--:" * (2 + len(COLUMNS)) + "|"
    for run in runs:
        figures = (form.format(value(run)) for _, value, form in COLUMNS)
        yield f"| {run.grown(what):,} | {run.spec.rooms:,} | {' | '.join(figures)} |"
    ranks = [run.grown(what) for run in runs]
    slopes = (growth(ranks, [value(run) for run in runs]) for _, value, _ in COLUMNS)
    yield f"| ranks^ | | {' | '.join(f'{slope:.2f}' for slope in slopes)} |"
