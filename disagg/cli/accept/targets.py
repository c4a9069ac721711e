"""Ratios to aim at on one GPU. docs/performance.md lists them for readers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from disagg.cli.bench.case import BenchCase

TARGET_GPU = "H200"
"""What the name of the GPU contains that the targets are for."""


class Target(NamedTuple):
    """The least ratio to a device copy of the cases with these groups and names (patterns)."""

    what: str
    groups: Sequence[str]
    cases: Sequence[str]
    ratio: float

    def covers(self, case: BenchCase) -> bool:
        """Whether it is a target of this case."""
        return case.group in self.groups and any(fnmatchcase(case.name, n) for n in self.cases)


TARGETS = (
    Target(
        *("store of K and V, store of MLA rows in bf16", ["store"], ["K and V *", "MLA bf16*"]),
        0.85,
    ),
    Target("store of fp8 rows: MLA 656, index keys 132, DSv4 584", ["store"], ["*fp8, *"], 0.70),
    Target("move of pages in all layers", ["move"], ["*"], 0.85),
    Target("gather and scatter, runs of 512 bytes and up", ["gather", "scatter"], ["*"], 0.80),
)


def target_of(case: BenchCase) -> float | None:
    """The least ratio of a case, or None."""
    return next((target.ratio for target in TARGETS if target.covers(case)), None)
