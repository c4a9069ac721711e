"""`python -m tests.fuzz --runs 1000000`: coverage-guided fuzzing of every target.

Each target runs in a process of its own, on Atheris (libFuzzer), with its address space limited.
Only inputs that are findings are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MAX_INPUT = 1 << 16
ROOM = 1 << 30
"""Bytes of address space that a process may use beyond what it has when it begins."""
HANG_SECONDS = 60
INPUTS_A_PROCESS = 15_000
"""A target begins again in a new process after so many: Atheris leaks about 0.1 KiB each time that
instrumented code compares numpy arrays."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs, over all targets")
    parser.add_argument("--target", action="append", help="only this one (may be repeated)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="one input of the target that is named")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if find_spec("atheris") is None and options.replay is None:
        print("Atheris is missing: pip install atheris (Linux, CPython 3.11 to 3.13).")
        return 1
    if options.child is not None:
        _child(options.target[0], options.runs, options.seed, options.child)
    from tests.fuzz.targets import TARGETS

    names = options.target or [name for name, target in TARGETS.items() if target.share]
    unknown = set(names) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}.")
    if options.replay is not None:
        print(TARGETS[names[0]].run(options.replay.read_bytes()))
        return 0
    packages = ("atheris", "msgspec", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{p} {_version(p)}' for p in packages)}")
    print("| target | inputs | seconds | peak memory, MiB | slowest, s | outcomes |")
    print("|---|--:|--:|--:|--:|---|")
    shares = {name: max(1, TARGETS[name].share) for name in names}
    runs = {name: options.runs * share // sum(shares.values()) for name, share in shares.items()}
    runs[names[0]] += options.runs - sum(runs.values())
    began = time.monotonic()
    found = sum(_fuzz(name, count, options.seed) for name, count in runs.items())
    print(f"\n{options.runs:,} inputs, {time.monotonic() - began:.0f} s, {found} findings")
    return found


def _fuzz(name: str, runs: int, seed: int) -> int:
    """Runs one target in a process of its own and prints its line; whether it had a finding."""
    place = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz", "--child", str(place), "--target", name]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # arenas of threads take address space
    code = 0
    with (place / "log").open("w") as log:
        for done in range(0, runs, INPUTS_A_PROCESS):
            part = ["--runs", str(min(INPUTS_A_PROCESS, runs - done)), "--seed", str(seed + done)]
            child = subprocess.run([*command, *part], env=environment, stdout=log, stderr=log)
            if code := child.returncode:
                break
    tally = json.loads((place / "tally").read_text())
    common = sorted(tally["outcomes"].items(), key=lambda pair: -pair[1])
    print(
        f"| {name} | {tally['inputs']:,} | {time.monotonic() - began:.0f} "
        f"| {tally['peak'] / (1 << 20):.1f} | {tally['seconds']:.2f} "
        f"| {', '.join(f'{outcome} {count:,}' for outcome, count in common)} |",
        flush=True,
    )
    if code:
        print(f"\n{name}: a finding. See {place}/log, and {place}/crash-* or timeout-*.\n")
        return 1
    shutil.rmtree(place)
    return 0


def _child(name: str, runs: int, seed: int, place: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["disagg", "kvpool"]):
        from tests.fuzz.guard import Tally, guarded
        from tests.fuzz.targets import TARGETS
    target, counts = TARGETS[name], place / "tally"
    tally = Tally(**json.loads(counts.read_text())) if counts.exists() else Tally()
    until = tally.inputs + runs
    corpus = place / "corpus"
    corpus.mkdir(exist_ok=True)  # an earlier process may have left what it found new
    seeds = list(target.seeds())
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)
    own = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (own + ROOM, own + ROOM))

    def note() -> None:
        counts.write_text(json.dumps(asdict(tally)))

    def one(data: bytes) -> None:
        try:
            guarded(lambda: target.run(data), len(data), tally)
        except BaseException:
            note()
            raise
        if tally.inputs % 1000 == 0 or tally.inputs >= until:
            note()

    def mutated(data: bytes, most: int, number: int) -> bytes:
        source = random.Random(number)
        if target.mutate is None or source.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        # half of them from a seed: coverage sees no branches inside msgspec, which is C
        return target.mutate(source.choice([data, source.choice(seeds)]), source, most)

    note()
    logging.disable()
    tracemalloc.start()  # once: each start and stop leaks some kilobytes
    flags = [f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_INPUT}", "-len_control=0"]
    flags += ["-mutate_depth=1", "-reduce_inputs=0", f"-timeout={HANG_SECONDS}"]
    flags += [f"-artifact_prefix={place}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
