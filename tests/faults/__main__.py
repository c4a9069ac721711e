"""`python -m tests.faults --runs 500`: seeded runs with one fault each, and a table of results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from tests.faults.run import Outcome
from tests.faults.world import Violation
from tests.faults.worlds import Worlds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    options = parser.parse_args(arguments)
    began, failed = time.monotonic(), 0
    outcomes: list[Outcome] = []
    with Worlds() as worlds:
        for seed in range(options.seed, options.seed + options.runs):
            try:
                outcomes.append(worlds.run(seed))
                if options.verbose:
                    print(outcomes[-1], flush=True)
            except Violation as violation:
                failed += 1
                print(f"{type(violation).__name__}: {violation}", flush=True)
        worlds.close()
    print(f"{options.runs} runs in {time.monotonic() - began:.0f} s, {failed} violations\n")
    _table("fault", outcomes, lambda outcome: outcome.kind)
    _table("pools and engine", outcomes, lambda outcome: outcome.shape)
    return failed


HEAD = (
    *("runs", "repeated", "rooms that succeeded", "failed", "of these given up"),
    "noticed after, s: median, 95 %, max",
    "pages back after, s: median, max",
)


def _table(what: str, outcomes: list[Outcome], key: Callable[[Outcome], str]) -> None:
    print("|", " | ".join((what, *HEAD)), "|")
    print("|---|--:|--:|--:|--:|--:|---|---|")
    for name in [*sorted({key(outcome) for outcome in outcomes}), "all"]:
        some = [outcome for outcome in outcomes if name in (key(outcome), "all")]
        noticed = sorted(seconds for outcome in some for seconds in outcome.noticed)
        back = sorted(seconds for outcome in some for seconds in outcome.quarantine)
        counts = (
            str(sum(getattr(outcome, field) for outcome in some))
            for field in ("repeated", "succeeded", "failed", "given_up")
        )
        times = _quantiles(noticed, (0.5, 0.95, 1)), _quantiles(back, (0.5, 1))
        print("|", " | ".join((name, str(len(some)), *counts, *times)), "|")
    print()


def _quantiles(values: list[float], shares: Iterable[float]) -> str:
    if not values:
        return ""
    return ", ".join(f"{values[round(share * (len(values) - 1))]:.3f}" for share in shares)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
