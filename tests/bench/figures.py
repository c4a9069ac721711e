"""The tables of docs/performance.md: a benchmark's figures stand between the marks that name it, so
that one command writes them again (`make figures`).
"""

from __future__ import annotations

import json
import os
import platform
import re
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
TABLES = re.compile(r"<!-- figures of (.+?) -->(.*?)<!-- end of figures -->", re.S)
UNITS = ((0, "s"), (3, "ms"), (6, "µs"))
SHARED = "all tables"  # what stands here is not said again above each of them
ENGINES = ("nixl-tcp", "local", "nixl", "mooncake")
PACKAGES = ("torch", "nixl-cu12", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A case's seconds, and its reference's over them: the median of rounds, and how far the middle
    half of the rounds lies from it at most (None: of one round). `file` is the benchmark's, as the
    page's marks have it.
    """

    file: str
    case: str
    engine: str
    seconds: float
    ratio: float
    spread: float | None


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
        spread=max(ratio - low, high - ratio) if ratios[1:] else None,
    )


def table(figures: Iterable[Figure]) -> str:
    """Cases as rows; ratio and time in a column for each engine, or in a column each."""
    cells: dict[str, dict[str, str]] = {}
    for row in figures:
        by_head = cells.setdefault(row.case, {})
        if row.engine:
            by_head[f"`{row.engine}`"] = f"{ratio_of(row)}, {time_of(row.seconds)}"
        else:
            by_head.update(ratio=ratio_of(row), time=time_of(row.seconds))
    heads = [*dict.fromkeys(head for by_head in cells.values() for head in by_head)]
    lines = [["case", *heads], ["---", *("--:" for _ in heads)]]
    lines += [[case, *(by_head.get(head, "") for head in heads)] for case, by_head in cells.items()]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def ratio_of(row: Figure) -> str:
    """`0.96 ±0.03`, with more digits for small ratios."""
    digits = 0 if row.ratio >= 100 else 1 if row.ratio >= 10 else 2 if row.ratio >= 0.1 else 4
    spread = "" if row.spread is None else f" ±{row.spread:,.{digits}f}"
    return f"{row.ratio:,.{digits}f}{spread}"


def time_of(seconds: float) -> str:
    """With three digits."""
    power, unit = next((p, unit) for p, unit in UNITS if abs(seconds) >= 10**-p or unit == "µs")
    return f"{10**power * seconds:.3g} {unit}"


def where_and_when() -> str:
    """The machine, the day and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in lines if line.startswith("model name")), platform.machine())
    words = [f"{os.cpu_count()} cores of {model.partition(': ')[2] or model}"]
    words += [time.strftime("%Y-%m-%d", time.gmtime())]
    words += [f"{package} {version(package)}" for package in PACKAGES]
    return ", ".join(words) + "."


def write_all(figures: Sequence[Figure], page: Path = PAGE) -> None:
    """Writes the tables of all benchmarks that have figures, each between the marks of its file,
    and above it where and when it was measured; once for the page, if that is the same for all of
    its tables. Raises ValueError if the page has no such marks.
    """
    text = page.read_text()
    bodies = {file: body.strip() for file, body in TABLES.findall(text)}
    shared = bodies.pop(SHARED)
    if shared:
        bodies = {file: f"{shared}\n\n{body}" for file, body in bodies.items()}
    for file, rows in groupby(sorted(figures, key=attrgetter("file")), attrgetter("file")):
        if file not in bodies:
            marks = f"<!-- figures of {file} --> and <!-- end of figures -->"
            raise ValueError(f"{page}: no table of {file}. Write {marks} into it.")
        bodies[file] = f"{where_and_when()}\n\n{table(rows)}"
    shared, *others = {body.partition("\n")[0] for body in bodies.values()}
    if others:
        shared = ""
    bodies = {file: body.removeprefix(f"{shared}\n\n") for file, body in bodies.items()}
    bodies[SHARED] = shared

    def written(match: re.Match[str]) -> str:
        file = match[1]
        return f"<!-- figures of {file} -->\n\n{bodies[file]}\n\n<!-- end of figures -->"

    page.write_text(TABLES.sub(written, text))


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
