"""`python -m tests.faults --runs 500`: seeded runs with one fault each."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

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
    print(f"{options.runs} runs in {time.monotonic() - began:.0f} s, {failed} violations")
    for what in ("succeeded", "failed"):
        print(f"rooms that {what}: {sum(getattr(outcome, what) for outcome in outcomes)}")
    for what in ("noticed", "quarantine"):
        times = [seconds for outcome in outcomes for seconds in getattr(outcome, what)]
        print(f"{what} after {median(times or [0]):.3f} s, at most {max(times, default=0):.3f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
