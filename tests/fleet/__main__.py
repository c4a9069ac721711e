"""`python -m tests.fleet`: a fleet of real endpoints in virtual time (docs/scale.md).

Options are the fields of `Spec` in spec.py. With --grow, runs of 8 ranks, 16 and so on: `fleet` has
more engines, `prefill` and `decode` one engine that gets larger beside one of 4 ranks, `both` one
engine on each side. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields

from tests.fleet.figures import Figures
from tests.fleet.fleet import Fleet
from tests.fleet.report import WHAT, growth_table, one_table
from tests.fleet.spec import Spec


def main(arguments: Sequence[str]) -> int:
    """Runs fleets and prints their figures, as tables or, with --json, as one list."""
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
    parser.add_argument("--json", action="store_true")
    options = vars(parser.parse_args(arguments))
    grow, ranks, as_json = (options.pop(name) for name in ("grow", "ranks", "json"))
    try:
        spec = Spec(**options)
        series = {what: list(spec.growing(what, ranks)) for what in grow}
    except ValueError as error:
        parser.error(str(error))
    runs: list[Figures] = []
    for what, specs in series.items() or ((None, [spec]),):
        figures = [Fleet(spec).run() for spec in specs]
        runs += figures
        if not as_json:
            lines = one_table(figures[0]) if what is None else growth_table(what, figures)
            print(*lines, "", sep="\n")
    if as_json:
        print(json.dumps([run.as_dict() for run in runs], indent=1))
    broken = [f"broken: {run.ranks} ranks: {line}" for run in runs for line in run.broken]
    print(*broken, sep="\n", end="", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
