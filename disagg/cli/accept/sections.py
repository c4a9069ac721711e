"""The sections, in the order in which they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from disagg.cli.accept.bench import bench_rows
from disagg.cli.accept.kit import conformance_rows, hardware_rows
from disagg.cli.accept.report import FAILED, Row, SectionResult
from disagg.cli.accept.scope import Scope
from disagg.cli.accept.trials import engine_rows, model_rows
from kvpool.testing.run import HARDWARE_CHECKS


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
