"""Ratios to aim at on one GPU. docs/performance.md lists them for readers."""

from __future__ import annotations

from fnmatch import fnmatchcase

from disagg.cli.bench.case import BenchCase

TARGET_GPU = "H200"
"""What the name of the GPU contains that the targets are for."""
TARGETS = (
    # what, patterns of `group: case`, the least ratio to a device copy
    (
        "store of K and V, store of MLA rows in bf16",
        ("store: K and V *", "store: MLA bf16*"),
        0.85,
    ),
    ("store of fp8 rows: MLA 656, index keys 132, DSv4 584", ("store: *fp8, *",), 0.70),
    ("move of pages in all layers", ("move: *",), 0.85),
    ("gather and scatter, runs of 512 bytes and up", ("gather: *", "scatter: *"), 0.80),
)


def target_of(case: BenchCase) -> float | None:
    """The least ratio of a case, or None."""
    for _, patterns, ratio in TARGETS:
        if any(fnmatchcase(case.title, pattern) for pattern in patterns):
            return ratio
    return None
