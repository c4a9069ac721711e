"""`python -m tests.fleet`: a fleet of real endpoints in virtual time (docs/scale.md).

Options are the fields of `Spec` in spec.py. With --grow, runs of 8 ranks, 16 and so on: `fleet` has
more engines, `prefill` and `decode` one engine that gets larger beside one of 4 ranks, `both` one
engine on each side. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields

from kvpool.layout.units import human
from tests.fleet.fleet import SIDES, Fleet, growth
from tests.fleet.spec import Spec

WHAT = {
    "fleet": "ranks of the fleet",
    "prefill": "prefill ranks of each room, beside 4 of decode",
    "decode": "decode ranks of each room, beside 4 of prefill",
    "both": "ranks of each room, half of them prefill",
}
COLUMNS = (
    ("rooms/s", lambda run: run.rooms_per_second, "{:,.0f}"),
    ("messages a room", lambda run: run.per_room(run.network.sent), "{:,.1f}"),
    ("largest inbox", lambda run: max(run.peaks[side, "inbox"] for side in SIDES), "{:,.0f}"),
    ("open rooms", lambda run: max(run.peaks[side, "open"] for side in SIDES), "{:,.0f}"),
    ("bytes a decode peer", lambda run: run.memory["decode_peer"], "{:,.0f}"),
    ("a room", lambda run: run.memory["decode_room"], "{:,.0f}"),
    ("bytes a prefill peer", lambda run: run.memory["prefill_peer"], "{:,.0f}"),
    ("a room", lambda run: run.memory["prefill_room"], "{:,.0f}"),
)
"""Of a table of several runs."""


def main(arguments: Sequence[str]) -> int:
    """Runs fleets and prints their figures as Markdown tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fleet",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option in fields(Spec):
        flag, default = f"--{option.name.replace('_', '-')}", option.default
        if isinstance(default, bool):
            parser.add_argument(flag, default=default, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, default=default, type=type(default))
    parser.add_argument("--grow", action="append", choices=WHAT, default=[])
    parser.add_argument("--ranks", type=int, default=1024, help="with --grow, the most")
    options = vars(parser.parse_args(arguments))
    grow, ranks = options.pop("grow"), options.pop("ranks")
    try:
        spec = Spec(**options)
    except ValueError as error:
        parser.error(str(error))
    broken: list[str] = []
    for lines in [growth_table(what, spec, ranks, broken) for what in grow] or [
        one_table(spec, broken)
    ]:
        print(*lines, "", sep="\n")
    print(*broken, sep="\n", end="", file=sys.stderr)
    return int(bool(broken))


def ran(spec: Spec, broken: list[str]) -> Fleet:
    """A fleet that has run; what it broke is noted."""
    run = Fleet(spec).run()
    broken += [f"broken: {spec.ranks} ranks: {line}" for line in run.broken]
    return run


def one_table(spec: Spec, broken: list[str]) -> Iterator[str]:
    run = ran(spec, broken)
    sent, links, memory = run.network.sent, run.links, run.memory
    apart = run.per_room(sent, False) * spec.rooms / run.seconds / max(1, links)
    engines = (f"{spec.engines(s):,} {s} engines of {spec.tp(s)}" for s in SIDES)
    plans = [rank.endpoint.machine.peers.plans for rank in run.decodes]
    counted = (sum(getattr(plan, name) for plan in plans) for name in ("misses", "hits", "seconds"))
    rows = {
        "fleet": f"{', '.join(engines)}: {spec.ranks:,} ranks, {links:,} connections",
        "rooms": f"{spec.rooms:,}, {run.failed:,} failed; {run.died:,} ranks died",
        "on ranks": ", ".join(f"{what} {n:,}" for what, n in sorted(run.parts.items())),
        "failures on ranks": ", ".join(f"{w} {n:,}" for w, n in sorted(run.failures.items())),
        "rooms a second": f"{run.rooms_per_second:,.1f}, virtual; all {run.seconds:,.1f} s",
        "a room takes": f"{1e3 * run.room_seconds(0.5):,.1f} ms, 99 of 100 within "
        f"{1e3 * run.room_seconds(0.99):,.1f} ms",
        "messages a room": f"{run.per_room(sent):,.1f}, "
        f"{human(int(run.per_room(run.network.nbytes)))}",
        "of connections": f"{apart:.2f} messages a second and connection",
        "lost messages": f"{run.network.lost:,}",
    }
    for side in SIDES:
        words = {"inbox": "messages waiting", "open": "rooms open", "backlog": "waiting for pages"}
        most = (f"{run.peaks[side, what]:,} {text}" for what, text in words.items())
        rows[f"most on a {side} rank"] = ", ".join(most)
    for what in ("peer", "room"):
        sizes = (f"{human(memory[f'{side}_{what}'])} on {side}" for side in SIDES)
        rows[f"memory of a {what}"] = ", ".join(sizes)
    rows["plans"] = "{:,} made, {:,} known: {:.2f} s here".format(*counted)
    rows["this machine"] = f"{run.cpu_seconds:,.1f} s of its processor"
    rows["trace"] = run.timeline.trace
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {words or 'none'} |" for name, words in rows.items())


def growth_table(what: str, spec: Spec, ranks: int, broken: list[str]) -> Iterator[str]:
    """A row for each run, and how each figure grows with the ranks of what grows."""
    yield f"{WHAT[what]}:\n"
    yield f"| ranks | rooms | {' | '.join(name for name, _, _ in COLUMNS)} |"
    yield "|--:" * (2 + len(COLUMNS)) + "|"
    sizes, rows = [], []
    for grown in spec.growing(what, ranks):
        run = ran(grown, broken)
        sizes.append(grown.ranks if what in ("fleet", "both") else getattr(grown, what))
        rows.append([value(run) for _, value, _ in COLUMNS])
        cells = (form.format(value) for value, (_, _, form) in zip(rows[-1], COLUMNS))
        yield f"| {sizes[-1]:,} | {grown.rooms:,} | {' | '.join(cells)} |"
    slopes = (growth(sizes, values) for values in zip(*rows))
    yield f"| ranks^ | | {' | '.join(f'{slope:.2f}' for slope in slopes)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
