"""Runs the rows of a suite until each can be judged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from disagg.testing.judge import Observation, judge
from disagg.testing.report import ConformReport, TriedPair, read_report
from disagg.testing.suite import Pair, Suite
from kvpool.version import __version__

REPORTS = "conform.json", "conform.html", "conform.md"


def try_pairs(
    suite: Suite,
    pairs: Sequence[Pair],
    *,
    observe: Callable[[Pair], Observation],
    kept: Mapping[str, TriedPair],
    progress: Callable[[str], None],
) -> Iterator[TriedPair]:
    """A row of each pair, in their order: from `kept`, by the digest of its settings, or run until
    it can be judged.
    """
    for number, pair in enumerate(pairs, 1):
        digest, place = suite.digest(pair), f"[{number}/{len(pairs)}] {pair.name}"
        row = kept.get(digest)
        if row is None:
            progress(place)
            row = _trial(pair, digest, observe=observe, progress=progress)
            progress(f"{place}: {row.verdict.words()}")
        else:
            progress(f"{place}: kept: {row.verdict.words()}")
        yield row


def _trial(
    pair: Pair,
    digest: str,
    *,
    observe: Callable[[Pair], Observation],
    progress: Callable[[str], None],
) -> TriedPair:
    runs: list[Observation] = []
    start = time.monotonic()
    while (verdict := judge(runs)) is None:
        if runs:
            progress(f"run {len(runs) + 1} of {pair.name}, to reproduce what run 1 showed")
        runs.append(observe(pair))
    return TriedPair(
        pair=pair,
        digest=digest,
        verdict=verdict,
        versions={"kvpool": __version__, **runs[-1].versions},
        date=now(),
        seconds=round(time.monotonic() - start, 1),
    )


def now() -> str:
    """UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def kept_trials(folder: Path) -> dict[str, TriedPair]:
    """Rows of an earlier run in this folder, by digest. What was not here may be now, and is not
    among them. Raises ValueError for another file.
    """
    path = folder / REPORTS[0]
    rows = read_report(path).rows if path.exists() else ()
    return {row.digest: row for row in rows if row.verdict.result != "not here"}


def write_reports(folder: Path, report: ConformReport) -> None:
    """Each file is replaced at once, so that an interrupted run leaves whole ones."""
    texts = report.as_json(), report.html().encode(), report.markdown().encode()
    for name, data in zip(REPORTS, texts, strict=True):
        part = folder / f".{name}.part"
        part.write_bytes(data)
        os.replace(part, folder / name)
