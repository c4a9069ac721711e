"""`python -m tests.soak --minutes 30`: endpoints under load and faults, and nothing grows.

Exit status 1 if a byte was wrong, something hung, a process died or something grew, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from tests.disagg.engines.peers import ENGINES
from tests.faults.world import Violation
from tests.soak.report import MIB, Ended, Report
from tests.soak.slices import FAMILIES, FAULTS, USUAL, Limits, Slice, trends

PERIOD = 10.0
"""Seconds between two lines of progress."""


def soak(
    slices: Sequence[Slice], report: Report, limits: Limits, tell: Callable[[str], None]
) -> None:
    """Runs slices one after the other, into the report, also where it is interrupted."""
    end = time.monotonic() + sum(part.seconds for part in slices)
    for part in slices:
        ended, told = Ended(part), 0.0
        report.slices.append(ended)
        try:
            for seconds in part.run():
                if seconds - told >= PERIOD:
                    told = seconds
                    tell(_progress(part, end - time.monotonic()))
            ended.trends += trends(part.samples, limits)
        except (Violation, ValueError) as broken:
            ended.problem = str(broken)
        except KeyboardInterrupt:
            report.interrupted = True
            return
        for sentence in ended.failures:
            tell(f"FAIL {sentence}")


def _progress(part: Slice, left: float) -> str:
    minutes, seconds = divmod(max(round(left), 0), 60)
    held = "; ".join(
        f"{name} {series[-1].memory / MIB:.1f} MiB, {series[-1].files} files, "
        f"{series[-1].threads} threads"
        for name, series in part.samples.items()
    )
    rooms = part.rooms.total()
    return f"{minutes}:{seconds:02} left, {part.name}: {rooms:,} rooms; {held}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="of all together (30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES, metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}, which are here (all)",
    )  # fmt: skip
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], metavar="FAMILY",
        help=f"of {', '.join(FAMILIES)} (all)",
    )  # fmt: skip
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=USUAL, metavar="FAULT",
        help=f"of {', '.join(map(repr, FAULTS))} (all)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=float, default=4, metavar="MIB", help="by which a process may grow (4)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="(build/soak)")
    options = parser.parse_args(arguments)
    report = Report(options.seed, options.minutes)
    pairs = [*product(options.families, options.engines)]
    seconds = 60 * options.minutes / len(pairs)
    slices = [
        Slice(engine, family, seconds, options.seed, options.faults) for family, engine in pairs
    ]
    soak(slices, report, Limits(memory=round(options.memory * MIB)), lambda t: print(t, flush=True))
    report.write(options.out)
    print("", *report.lines(), "", f"wrote {options.out}/soak.json and soak.md", sep="\n")
    return 130 if report.interrupted else 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
