"""`python -m tests.fuzz --runs 100000`: coverage-guided fuzzing of every target, on Atheris.

Only inputs that are findings are kept.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

MAX_INPUT = 1 << 16
HANG_SECONDS = 60
INPUTS_A_PROCESS = 15_000
"""A target begins again in a new process after so many: Atheris leaks about 0.1 KiB each time that
instrumented code compares numpy arrays."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs of each target")
    parser.add_argument("--target", action="append", help="only this one (may be repeated)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="one input of the target that is named")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        _child(options.target[0], options.runs, options.seed, options.child)
    from tests.fuzz.targets import TARGETS

    names = options.target or [*TARGETS]
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}.")
    if options.replay is not None:
        print(TARGETS[names[0]].run(options.replay.read_bytes()))
        return 0
    print("| target | inputs | peak memory, MiB | slowest, s | outcomes |")
    print("|---|--:|--:|--:|---|", flush=True)
    return sum(_fuzz(name, options.runs, options.seed) for name in names)


def _fuzz(name: str, runs: int, seed: int) -> int:
    """Runs one target in processes of their own, each of which prints a line; whether one had a
    finding.
    """
    place = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    (place / "corpus").mkdir()
    command = [sys.executable, "-m", "tests.fuzz", "--child", str(place), "--target", name]
    for done in range(0, runs, INPUTS_A_PROCESS):
        part = ["--runs", str(min(INPUTS_A_PROCESS, runs - done)), "--seed", str(seed + done)]
        with (place / "log").open("w") as log:
            if subprocess.run([*command, *part], stderr=log).returncode:
                print(f"\n{name}: a finding. See {place}/log, and crash-* or timeout-* beside it.")
                return 1
    shutil.rmtree(place)
    return 0


def _child(name: str, runs: int, seed: int, place: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["disagg", "kvpool"]):
        from tests.fuzz.guard import Tally, guarded
        from tests.fuzz.targets import TARGETS
    target, tally, corpus = TARGETS[name], Tally(), place / "corpus"
    seeds = list(target.seeds())
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)

    def run(data: bytes) -> None:
        guarded(lambda: target.run(data), len(data), tally)
        if tally.inputs == runs:
            outcomes = sorted(tally.outcomes.items(), key=lambda pair: -pair[1])
            print(
                f"| {name} | {tally.inputs:,} | {tally.peak / (1 << 20):.1f} | {tally.seconds:.2f} "
                f"| {', '.join(f'{outcome} {count:,}' for outcome, count in outcomes)} |",
                flush=True,
            )

    def mutated(data: bytes, most: int, number: int) -> bytes:
        source = random.Random(number)
        if target.mutate is None or source.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        # half of them from a seed: coverage sees no branches inside msgspec, which is C
        return target.mutate(source.choice([data, source.choice(seeds)]), source, most)

    logging.disable()
    tracemalloc.start()  # once: each start and stop leaks some kilobytes
    flags = [f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_INPUT}", "-len_control=0"]
    flags += ["-mutate_depth=1", "-reduce_inputs=0", f"-timeout={HANG_SECONDS}"]
    flags += [f"-artifact_prefix={place}/", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], run, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
