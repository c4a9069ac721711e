"""The sections, in the order in which they run: the kit, engines, models, and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from io import StringIO
from typing import Any, NamedTuple

from rich.console import Console

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row, SectionResult
from disagg.cli.bench.case import QUICK, BenchCase, Measurement, Sizes, measured, sizes_for
from disagg.cli.bench.peer import BenchContext
from disagg.cli.bench.report import all_cases, sentence_of
from disagg.cli.bench.transfers import trial_cases
from disagg.cli.common import machine
from disagg.cli.demo.models import MODELS, DemoSettings
from disagg.engines.base import engine_class, engine_names
from kvpool.device import Device, get_device
from kvpool.extras import needs
from kvpool.layout.units import human
from kvpool.process import OtherProcess, ProcessFailed
from kvpool.testing.case import CheckFailure, Inapplicable, fail
from kvpool.testing.checks.hardware import HARDWARE_CHECKS, HardwareChecks
from kvpool.testing.run import all_checks

CHECK_TIMEOUT = 600.0  # seconds until a check of the kit is ended
QUICK_POOL = "mla fp8"
DTYPE = "bfloat16"
QUICK_MODEL = ("llama", DTYPE)
TRIAL_TOKENS = (1000, 100)  # of an engine's hand-offs: usually, and where sizes are minimal
OTHER_PROCESSES = ("transfer", "handoff")  # which `quick` leaves to the section of engines
TARGET_GPU = "H200"  # in the name of the GPU that targets are for


@dataclass(frozen=True)
class Scope:
    """The device, whether little is to be tried of everything, and what shows what runs now."""

    device: Device
    quick: bool
    tell: Callable[[str], object] = lambda _: None

    @property
    def small(self) -> bool:
        """Whether sizes are minimal and nothing is timed: if `quick`, and on emulated devices."""
        return self.quick or self.device.emulated

    def tried(self, name: str, work: Callable[[], str]) -> Row:
        """The row of one thing that is tried. `work` returns what it found, or raises Inapplicable
        if it cannot be tried here; anything else that it raises is a failure.
        """
        self.tell(name)
        began = time.monotonic()
        try:
            state, sentence = PASSED, work()
        except Inapplicable as why:
            state, sentence = NOT_HERE, str(why)
        except CheckFailure as failure:
            state, sentence = FAILED, str(failure)
        except Exception as error:  # the others are tried all the same
            state, sentence = FAILED, f"{type(error).__name__}: {error}"
        return Row(name, state, " ".join(sentence.split()), time.monotonic() - began)


class AcceptSection(NamedTuple):
    """A section of the report: `run` tries everything in it."""

    name: str
    title: str
    run: Callable[[Scope], list[Row]]

    def result(self, scope: Scope) -> SectionResult:
        """Its rows; an error of the section itself is one of them."""
        began = time.monotonic()
        try:
            rows = self.run(scope)
        except Exception as error:  # the other sections run all the same
            sentence = f"{type(error).__name__}: {error}"
            rows = [Row(f"section {self.name}", FAILED, " ".join(sentence.split()))]
        return SectionResult(self.name, self.title, time.monotonic() - began, rows)


def conformance_rows(scope: Scope) -> list[Row]:
    """A row for the device, one for each pool, and one for each check that did not pass."""
    by_subject: dict[str, list[Row]] = {}
    pools = [QUICK_POOL] if scope.quick else ["*"]
    with OtherProcess(Kit, scope.device.name, pools, name="the kit") as process:
        try:
            checks = process.call("names")
            for number, (subject, check) in enumerate(checks):
                scope.tell(f"{number} of {len(checks)}: {subject}, {check}")
                row = process.call("tried", subject, check, timeout=CHECK_TIMEOUT)
                by_subject.setdefault(subject, []).append(row)
        except ProcessFailed as error:
            by_subject["kit"] = [Row("kit", FAILED, str(error))]
    rows = []
    for subject, tried in by_subject.items():
        if passed := [row.seconds for row in tried if row.state == PASSED]:
            rows.append(Row(subject, PASSED, f"{len(passed):,} checks", sum(passed)))
        rows += [row for row in tried if row.state != PASSED]
    return rows


class Kit:
    """Called by the other process, since a device that crashes must end only that."""

    def __init__(self, name: str, pools: list[str]) -> None:
        device = get_device(name)
        self._scope = Scope(device, quick=False)
        self._checks = {  # those of hardware have sections of their own
            (f"pool {check.pool}" if check.pool else f"device {name}", check.name): check
            for check in all_checks(device, pools, hardware=False)
        }

    def names(self) -> list[tuple[str, str]]:
        """What each check is of, and its name."""
        return [*self._checks]

    def tried(self, subject: str, name: str) -> Row:
        """Runs a check."""
        bound = self._checks[subject, name]
        return self._scope.tried(f"{subject}, {name}", partial(_passes, bound.check, bound.subject))


def hardware_rows(group: HardwareChecks, scope: Scope) -> list[Row]:
    """A row for each check of what only some devices have."""
    if (reason := group.unfit(scope.device)) is not None:
        return [Row(group.name, NOT_HERE, reason)]
    return [
        scope.tried(check.__name__.replace("_", " "), partial(_passes, check, scope.device))
        for check in group.checks
    ]


def _passes(check: Callable[[Any], None], argument: Any) -> str:
    check(argument)
    return check.__doc__ or ""


def engine_rows(scope: Scope) -> list[Row]:
    """A row for each engine that does not work here, and for each hand-off of the others."""
    rows, cases = list[Row](), list[BenchCase]()
    for engine in engine_names():
        if (reason := engine_class(engine).availability()) is not None:
            rows.append(Row(engine, NOT_HERE, reason))
        else:
            cases += trial_cases(engine, TRIAL_TOKENS[scope.small])
    return rows + case_rows(scope, cases, QUICK, timed=False)


def model_rows(scope: Scope) -> list[Row]:
    """A row for each family and packing."""
    if find_spec("transformers") is None:
        return [Row("demo", NOT_HERE, f"the demo {needs('transformers')}")]
    from disagg.cli.demo.sides import PrefillSide

    every = [(model, packing) for model in MODELS for packing in (DTYPE, "fp8")]
    rows = []
    with OtherProcess(PrefillSide) as prefill:
        for names in [QUICK_MODEL] if scope.quick else every:
            rows.append(scope.tried(", ".join(names), partial(_played, scope, prefill, *names)))
            if rows[-1].state == FAILED:
                prefill.close()  # another process for the next
    return rows


def _played(scope: Scope, prefill: OtherProcess, model: str, packing: str) -> str:
    from disagg.cli.demo.sides import decoded_prompts

    sizes: dict[str, Any] = {"prompts": (300,), "chunk_tokens": 100, "new_tokens": 8}
    if scope.small:
        sizes = {"prompts": (20,), "chunk_tokens": 12, "new_tokens": 2}
    device = scope.device.name
    settings = DemoSettings(model=model, dtype=DTYPE, packing=packing, device=device, **sizes)
    (prompt,) = decoded_prompts(prefill.revived(), settings, Console(file=StringIO()))
    if wrong := [check.found for check in prompt.checks if not check.passed]:
        fail("; ".join(wrong))
    return "; ".join(check.found for check in prompt.checks)


def bench_rows(scope: Scope) -> list[Row]:
    """A row for each case; if `small`, each is checked and none is timed."""
    sizes = sizes_for(scope.device, scope.quick)
    cases = all_cases(sizes)
    if scope.quick:
        cases = [case for case in cases if case.row.group not in OTHER_PROCESSES]
    return case_rows(scope, cases, sizes, timed=not scope.small)


def case_rows(scope: Scope, cases: Sequence[BenchCase], sizes: Sizes, *, timed: bool) -> list[Row]:
    """A row for each case."""
    gpu, rows = machine(scope.device)["name"], list[Row]()
    with closing(BenchContext(scope.device)) as context:
        for number, case in enumerate(cases, 1):
            scope.tell(f"{number} of {len(cases)}: {case.row.title}")
            began = time.monotonic()
            measurement = measured(case, context, sizes, timed=timed)
            rows.append(case_row(measurement, gpu, time.monotonic() - began))
    return rows


def case_row(row: Measurement, gpu: str, seconds: float) -> Row:
    """The row of a measurement. Only the GPU that targets are for can miss one."""
    if row.reason is not None:
        state = FAILED if row.failed else NOT_HERE
        return Row(row.title, state, " ".join(row.reason.split()), seconds)
    if row.ratio is None:
        return Row(row.title, PASSED, f"{human(row.bytes)}: every byte is right", seconds)
    missed, sentence = False, sentence_of(row)
    if row.target is not None and TARGET_GPU in gpu:
        missed = row.ratio < row.target
        sentence += f"; target {row.target:.2f}: {'not met' if missed else 'met'}"
    return Row(
        name=row.title,
        state=FAILED if missed else PASSED,
        sentence=sentence,
        seconds=seconds,
        figures=asdict(row),
    )


SECTIONS = (
    AcceptSection(
        "conformance", "the kit that every device must pass, byte for byte", conformance_rows
    ),
    *(
        AcceptSection(group.name, group.title, partial(hardware_rows, group))
        for group in HARDWARE_CHECKS
    ),
    AcceptSection(
        "engines", "every engine moves the device's memory between processes", engine_rows
    ),
    AcceptSection("models", "real models prefill in one process and decode in another", model_rows),
    AcceptSection("bench", "every operation beside the plain copy that bounds it", bench_rows),
)
