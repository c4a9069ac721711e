"""What `kvpool conform` found, as JSON, text, a page and a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from disagg.testing.judge import Verdict
from disagg.testing.suite import TRANSPORTS, Pair
from kvpool.render.page import page, text

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = "connector", "model", "prefill", "decode"
FAILED = "WRONG", "unsteady"
MOST = 200
"""Characters of a reason in a table; the JSON has all."""
COLOURS = {"serves": "var(--passed)", "WRONG": "var(--found)", "unsteady": "var(--found)"}
STYLE = """.map { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--line); }
td:last-child { min-width: 220px; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--quiet); }
@media (max-width: 700px) {
  thead { display: none; }
  tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  td { display: block; padding: 0; border: 0; }
}
"""
DOCUMENT = """# What serves with what

Written by `kvpool conform docs/{suite}` on {date} ([results](conform.md#results)). A side is an \
engine, its block size, and unusual settings: ranks, a draft. `kvpool` moves bytes over its engine \
`local` where no other is named.

{versions}.

{counts}.
"""


class TriedPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row that was run. `digest` is that of its settings, `date` in UTC."""

    pair: Pair
    digest: str
    verdict: Verdict
    versions: Mapping[str, str]
    date: str
    seconds: float

    def cells(self) -> tuple[str, str, str, str]:
        """What COLUMNS name. kvpool's connector names the engine that moves its bytes."""
        pair = self.pair
        by = f" over {pair.transport}" if pair.connector == "kvpool" else ""
        return pair.connector + by, pair.model, pair.prefill.words(), pair.decode.words()


class ConformReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a suite that were run. `complete` is false while some are to come."""

    suite: str
    date: str
    complete: bool
    rows: Sequence[TriedPair]
    format: Literal["kvpool-conform-1"] = "kvpool-conform-1"

    def as_json(self) -> bytes:
        """One JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def failed(self) -> list[TriedPair]:
        """Rows of kvpool's own connector that gave wrong answers."""
        ours = (row for row in self.rows if row.pair.connector == "kvpool")
        return [row for row in ours if row.verdict.result in FAILED]

    def counts(self) -> str:
        """How many rows ended how."""
        results = Counter(row.verdict.result for row in self.rows)
        counts = ", ".join(f"{count} {result}" for result, count in results.most_common())
        return f"{len(self.rows)} rows: {counts}" + ("" if self.complete else "; interrupted")

    def versions(self) -> str:
        """`kvpool 0.1.0; vllm: nixl 1.5.1, ...`: of all rows, each version that a package had."""
        numbers: dict[str, set[str]] = {}
        for row in self.rows:
            for package, number in row.versions.items():
                numbers.setdefault(package, set()).add(number)
        engines: dict[str, list[str]] = {}
        for name in sorted(numbers, key=lambda name: (": " in name, name)):
            engine, _, package = name.rpartition(": ")
            words = f"{package} {' and '.join(sorted(numbers[name]))}"
            engines.setdefault(f"{engine}: " if engine else "", []).append(words)
        return "; ".join(f"{engine}{', '.join(engines[engine])}" for engine in engines)

    def table(self) -> Table:
        """For the terminal."""
        from rich.markup import escape

        from kvpool.render.table import FittedTable

        table = FittedTable(title=f"{escape(self.suite)}, {self.date}")
        for name in COLUMNS:
            table.add_column(name)
        table.add_column("result", no_wrap=True)
        table.add_column("why", overflow="fold")
        for row in self.rows:
            cells = map(escape, (*row.cells(), row.verdict.result, shortened(row.verdict.reason)))
            table.add_row(*cells)
        table.caption = escape(f"{self.counts()}\n{self.versions()}")
        return table

    def html(self) -> str:
        """One self-contained page; a row opens to its settings."""
        head = "".join(f"<th>{name}</th>" for name in (*COLUMNS, "result", "why"))
        return page(
            "What serves with what",
            f"<p>{text(self.suite)}, {text(self.date)}. {text(self.counts())}.</p>",
            f"<p>{text(self.versions())}</p>",
            f'<div class="map"><table><thead><tr>{head}</tr></thead><tbody>',
            *(_html_row(row) for row in self.rows),
            "</tbody></table></div>",
            style=STYLE,
        )

    def markdown(self) -> str:
        """A page of documents. Connectors with the same settings share a line. A reason that
        several rows have is written once.
        """
        numbers: dict[str, int] = {}
        settings: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for row in self.rows:
            connector, *sides = row.cells()
            results = settings.setdefault(tuple(sides), {})
            connectors = results.setdefault(_noted(row, numbers), [])
            connectors.append(connector.removesuffix(f" over {TRANSPORTS[0]}"))
        lines = [f"| {' | '.join((*COLUMNS[1:], 'result'))} |", "|---|---|---|---|"]
        for cells, results in settings.items():
            result = "; ".join(f"{', '.join(names)}: {words}" for words, names in results.items())
            lines.append(f"| {' | '.join(map(_markdown, (*cells, result)))} |")
        head = DOCUMENT.format(
            suite=self.suite, date=self.date[:10], versions=self.versions(), counts=self.counts()
        )
        notes = [f"{number}. {_markdown(reason)}" for reason, number in numbers.items()]
        return "\n".join([head, *lines, *([""] if notes else []), *notes, ""])


def read_report(path: Path) -> ConformReport:
    """Raises ValueError for another file, and OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ConformReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no report of this version: {error}.") from None


def shortened(reason: str) -> str:
    """One line, at most MOST characters of it."""
    line = " ".join(reason.split())
    return line if len(line) <= MOST else f"{line[: MOST - 3].rstrip()}..."


def _noted(row: TriedPair, numbers: dict[str, int]) -> str:
    """A result; reasons of more than one word are notes below the table."""
    reason = shortened(row.verdict.reason)
    if " " in reason:
        return f"{row.verdict.result} ({numbers.setdefault(reason, len(numbers) + 1)})"
    return f"{row.verdict.result} ({reason})" if reason else row.verdict.result


def _markdown(words: str) -> str:
    """As text of a page that no character marks up."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in words)


def _html_row(row: TriedPair) -> str:
    result = row.verdict.result
    colour = f' style="color:{COLOURS[result]}"' if result in COLOURS else ""
    settings = msgspec.json.format(msgspec.json.encode(row), indent=1).decode()
    cells = "".join(f"<td>{text(cell)}</td>" for cell in row.cells())
    return (
        f"<tr>{cells}<td><b{colour}>{text(result)}</b></td><td>{text(row.verdict.reason)}"
        f"<details><summary>settings</summary>{text(settings)}</details></td></tr>"
    )
