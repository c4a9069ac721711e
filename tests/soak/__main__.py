"""`python -m tests.soak --minutes 30`: endpoints under load and faults, and nothing grows.

Exit status 1 if a byte was wrong, something hung, a process died or something grew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import product

from tests.disagg.engines.peers import ENGINES
from tests.faults.world import Violation
from tests.soak.slices import FAMILIES, FAULTS, LIMITS, USUAL, Slice, leaks, summary

PERIOD = 10.0
"""Seconds between two lines of progress."""


def soak(part: Slice, limits: dict[str, int] = LIMITS) -> list[str]:
    """Runs a slice, and prints how it goes; returns what went wrong."""
    told, problems = 0.0, []
    try:
        for seconds in part.run():
            if seconds - told >= PERIOD:
                told = seconds
                print(f"{seconds:.0f} s, {part}", flush=True)
        for process, series in part.samples.items():
            print(f"{part.name}: {process}: {summary(series)}", flush=True)
            problems += [f"{process}: {leak}" for leak in leaks(series, limits)]
    except (Violation, ValueError) as broken:
        problems.append(str(broken))
    print(part, *(f"FAIL {problem}" for problem in problems), sep="\n", flush=True)
    return problems


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="of all together (30)")
    parser.add_argument("--seed", type=int, default=0)
    for name, choices, usual in (
        ("engines", ENGINES, ENGINES),
        ("families", FAMILIES, FAMILIES),
        ("faults", FAULTS, USUAL),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=[*usual])
    parser.add_argument("--memory", type=float, default=4, help="MiB by which one may grow (4)")
    options = parser.parse_args(arguments)
    pairs = [*product(options.families, options.engines)]
    seconds = 60 * options.minutes / len(pairs)
    limits = {**LIMITS, "memory": round(options.memory * (1 << 20))}
    began, problems = time.monotonic(), []
    for family, engine in pairs:
        problems += soak(Slice(engine, family, seconds, options.seed, options.faults), limits)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
