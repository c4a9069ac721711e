"""The tables of docs/performance.md: a benchmark's figures stand between the marks that name it, so
that one command writes them again (`make figures`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median, quantiles

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
ENGINES = ("nixl-tcp", "local", "nixl", "mooncake")
PACKAGES = ("torch", "nixl-cu12", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A case's seconds, and its reference's over them: the median of rounds, and how far the middle
    half of the rounds lies from it at most. `file` is the benchmark's, as the page's marks have it.
    """

    file: str
    case: str
    engine: str
    seconds: float
    ratio: float
    spread: float


def figure(file: str, title: str, ours: Sequence[float], reference: Sequence[float]) -> Figure:
    """Of seconds by round. `title` is a test's: `test_room[nixl-4 KiB]` is case `room, 4 KiB`."""
    ratios = [theirs / mine for mine, theirs in zip(ours, reference)]
    low, ratio, high = quantiles(ratios, method="inclusive") if ratios[1:] else ratios * 3
    claim, _, parameters = title.removeprefix("test_").removesuffix("]").partition("[")
    engine = next((name for name in ENGINES if f"-{name}-" in f"-{parameters}-"), "")
    others = f"-{parameters}-".replace(f"-{engine}-", "-", 1).strip("-").replace("-", ", ")
    return Figure(
        file=file,
        case=", ".join(filter(None, (claim.replace("_", " "), others))),
        engine=engine,
        seconds=median(ours),
        ratio=ratio,
        spread=max(ratio - low, high - ratio),
    )


def table(figures: Iterable[Figure]) -> str:
    """Cases as rows, with a column of ratios for each engine, or the time and the ratio."""
    cells: dict[str, dict[str, str]] = {}
    for row in figures:
        by_head = cells.setdefault(row.case, {})
        if not row.engine:
            by_head["time"] = time_of(row.seconds)
        by_head[f"`{row.engine}`" if row.engine else "ratio"] = ratio_of(row)
    heads = [*dict.fromkeys(head for by_head in cells.values() for head in by_head)]
    lines = [["case", *heads], ["---", *("--:" for _ in heads)]]
    lines += [[case, *(by_head.get(head, "") for head in heads)] for case, by_head in cells.items()]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def ratio_of(row: Figure) -> str:
    """`0.96 ±0.03`, with more digits for small ratios."""
    digits = 0 if row.ratio >= 100 else 1 if row.ratio >= 10 else 2 if row.ratio >= 0.1 else 4
    return f"{row.ratio:,.{digits}f} ±{row.spread:,.{digits}f}"


def time_of(seconds: float) -> str:
    """In milliseconds or microseconds, with three digits."""
    return f"{1e3 * seconds:,.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.3g} µs"


def where_and_when() -> str:
    """The machine, the day and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in lines if line.startswith("model name")), platform.machine())
    words = [f"{os.cpu_count()} cores of {model.partition(': ')[2] or model}"]
    words += [time.strftime("%Y-%m-%d", time.gmtime())]
    words += [f"{package} {version(package)}" for package in PACKAGES]
    return ", ".join(words) + "."


def write_all(figures: Sequence[Figure], page: Path = PAGE) -> None:
    """Writes the tables of all benchmarks that have figures, each between the marks of its file.
    Raises ValueError if the page has no such marks.
    """
    text = page.read_text()
    for file, rows in groupby(sorted(figures, key=attrgetter("file")), attrgetter("file")):
        first, last = f"<!-- figures of {file} -->", "<!-- end of figures -->"
        before, mark, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not (mark and end):
            raise ValueError(f"{page}: no table of {file}. Write {first} and {last} into it.")
        body = f"{where_and_when()}\n\n{table(rows)}"
        text = f"{before}{first}\n\n{body}\n\n{last}{after}"
    page.write_text(text)


def main() -> None:
    """Writes the tables of `kvpool bench` from the file that its `--json` printed."""
    [path] = sys.argv[1:]
    figures = []
    for row in json.loads(Path(path).read_text())["rows"]:
        if row["ratio"] is None:
            continue
        low, high = row["ratio_quartiles"]
        engine, group = row["engine"] or "", row["group"]
        hand_off, case = group == "handoff", row["case"].removeprefix(f"{engine}, ")
        kind = "hand-offs" if hand_off else "engines" if engine else "rows"
        figures.append(
            Figure(
                file=f"kvpool bench, {kind}",
                case=case if hand_off else f"{group}: {case}",
                # of a hand-off, what it takes beyond the bare engine
                engine="" if hand_off else engine,
                seconds=row["beyond_seconds" if hand_off else "seconds"],
                ratio=row["ratio"],
                spread=max(row["ratio"] - low, high - row["ratio"]),
            )
        )
    write_all(figures)


if __name__ == "__main__":
    main()
