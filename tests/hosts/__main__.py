"""`python -m tests.hosts --runs 300`: seeded runs between hosts, each with a link that fails. With
`--kind vllm` or `sglang`, by the Python of that environment, real engines serve them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.engines.launcher import end_launchers
from tests.faults.world import Violation


def _runs(kind: str) -> Any:
    """What makes the runs."""
    # neither imports what the other's environment need not have
    if kind == "endpoints":
        from tests.hosts.runs import Runs

        return Runs()
    from tests.hosts import engine_runs

    return engine_runs.Runs(kind)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--kind", choices=("endpoints", "vllm", "sglang"), default="endpoints")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args(arguments)
    runs, failed, began = _runs(options.kind), 0, time.monotonic()
    try:
        for seed in range(options.seed, options.seed + options.runs):
            try:
                print(f"seed {seed}: {runs.run(seed)}", flush=True)
            except Violation as violation:
                failed += 1
                print(f"{type(violation).__name__}: {violation}", flush=True)
    finally:
        runs.close()
        end_launchers()
    print(f"{options.runs} runs in {time.monotonic() - began:.0f} s, {failed} violations")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
