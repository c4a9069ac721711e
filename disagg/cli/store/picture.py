"""A page that draws a store: bytes by geometry and kind, and the trees of prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.cli.store.common import model_words, used_word, when
from disagg.store.chunks import KINDS
from disagg.store.upkeep.inventory import Held, Inventory
from disagg.store.upkeep.tree import Chunk, Forest, Run, runs
from kvpool.layout.text import counted
from kvpool.layout.units import human
from kvpool.render.chart import COLOURS, Chart, ChartRow, Kind, Mark, Panel, chart_html, linear_axis

PAINT = dict(zip(KINDS, COLOURS))
BEFORE, MISSING = "var(--line)", COLOURS[3]
MOST_RUNS = 400
"""Of a namespace: rows of its trees that are drawn."""
MOST_MARKS = 200
"""Of a row: states that are drawn, the last ones."""
MOST_DEPTH = 8
"""By how many steps a row is moved to the right."""
UNITS = 1, 1 << 10, 1 << 20, 1 << 30, 1 << 40


def page(url: str, inventory: Inventory, forest: Forest) -> str:
    """One self-contained page."""
    total = inventory.amount()
    notes = [
        "A row of a tree is a run of chunks, each the only one to follow the one before. Rows "
        "below it, moved to the right, are what goes on from its end.",
        *(f"{chunk.key.hex()[:16]}: no head can be read: {chunk.why}" for chunk in forest.lost[:8]),
    ]
    if len(forest.lost) > 8:
        notes.append(f"And {len(forest.lost) - 8:,} more chunks without a head that can be read.")
    if inventory.foreign.objects:
        many = counted(inventory.foreign.objects, "object")
        notes.append(f"Not drawn: {many} not named as a store's.")
    namespaces = inventory.namespaces.values()
    chart = Chart(
        title=f"{url}: {counted(total.objects, 'object')}, {human(total.nbytes)}",
        legend=[
            ("bar", PAINT["full"], "full: state that every position keeps"),
            ("thin", PAINT["window"], "window: state of the last positions"),
            ("tick", PAINT["state"], "state: once a request, at a chunk's end"),
            ("thin", BEFORE, "the prefix before"),
            ("thin", MISSING, "a prefix before that is not there"),
        ],
        panels=[
            *([_amounts(inventory)] if inventory.namespaces else []),
            *(panel for namespace in namespaces for panel in _trees(url, namespace, forest)),
        ],
        notes=notes,
    )
    return chart_html(chart)


def _amounts(inventory: Inventory) -> Panel:
    """Bytes of each geometry, by kind."""
    sizes = [
        namespace.amount(digest).nbytes
        for namespace in inventory.namespaces.values()
        for digest in namespace.digests()
    ]
    most = max(sizes, default=0)
    unit = max(size for size in UNITS if size <= max(most, 1))
    axis = linear_axis(most / unit, lambda value: human(value * unit))
    rows: list[ChartRow | str] = []
    for namespace in inventory.namespaces.values():
        chunks = counted(len(namespace.keys), "chunk")
        rows.append(f"{namespace.namespace[:12]} {model_words(namespace)}: {chunks}")
        for digest in namespace.digests():
            rows.append(_geometry_row(namespace, digest, unit))
    return Panel("bytes by namespace and geometry", axis, rows)


def _geometry_row(namespace: Held, digest: bytes, unit: int) -> ChartRow:
    geometry, number = namespace.geometry(digest), namespace.number(digest)
    name = f"geometry {digest.hex()[:16]}, which the catalogue does not have"
    if geometry is not None:
        conventions = [f"{name}={value}" for name, value in geometry.conventions.items()]
        ranks = counted(len(geometry.parts), "rank")
        name = f"geometry {number}: {', '.join([ranks, *conventions[:4]])}"
    marks, start = [], 0.0
    for kind in KINDS:
        amount = namespace.amount(digest, kind)
        if amount.objects:
            end = start + amount.nbytes / unit
            words = f"{kind}: {counted(amount.objects, 'object')}, {human(amount.nbytes)}"
            marks.append(Mark(kind="bar", start=start, end=end, colour=PAINT[kind], tooltip=words))
            start = end
    total = namespace.amount(digest)
    return ChartRow(name, f"{counted(total.objects, 'object')}, {human(total.nbytes)}", marks)


def _trees(url: str, namespace: Held, forest: Forest) -> Iterator[Panel]:
    """The trees of a namespace, the largest first."""
    roots = [root for root in forest.roots if root.namespace == namespace.namespace]
    if not roots:
        return
    tokens = namespace.chunk_tokens or 1
    trees = sorted(([*runs(root)] for root in roots), key=_tree_bytes, reverse=True)
    every = [run for tree in trees for run in tree]
    last = max(run.first + len(run.chunks) for run in every)
    axis = linear_axis(last * tokens, lambda value: f"{value:,.0f}")
    rows: list[ChartRow | str] = [
        _run_row(run, tokens, used_word(url)) for run in every[:MOST_RUNS]
    ]
    if every[MOST_RUNS:]:
        rest = sum(len(run.chunks) for run in every[MOST_RUNS:])
        rows.append(f"and {len(every) - MOST_RUNS:,} more rows, of {counted(rest, 'chunk')}")
    unit = "tokens" if namespace.chunk_tokens else "chunks"
    words = f"prefixes of {namespace.namespace[:12]} {model_words(namespace)}, in {unit}"
    yield Panel(f"{words}: {counted(len(roots), 'tree')}", axis, rows)


def _tree_bytes(tree: Sequence[Run]) -> int:
    return sum(run.nbytes for run in tree)


def _run_row(run: Run, tokens: int, used: str) -> ChartRow:
    first, stop = run.first, run.first + len(run.chunks)
    indent = "\u00a0\u00a0" * min(run.depth, MOST_DEPTH) + ("\u2514 " if run.depth else "")
    name = f"{indent}{run.chunks[0].key.hex()[:8]}: {first * tokens:,} to {stop * tokens:,}"
    last = max((chunk.used or 0.0 for chunk in run.chunks), default=0.0)
    figure = f"{counted(len(run.chunks), 'chunk')}, {human(run.nbytes)}"
    marks: list[Mark] = []
    if first:
        colour = BEFORE if run.depth else MISSING
        words = "the prefix before" if run.depth else "a prefix that is not there: no hit ends here"
        marks.append(Mark(kind="thin", start=0.0, end=first * tokens, colour=colour, tooltip=words))
    when_used = f", last {used} {when(last)} UTC" if last else ""
    shapes: tuple[tuple[str, Kind], ...] = (("full", "bar"), ("window", "thin"))
    for kind, shape in shapes:
        for start, end in _stretches(run, kind):
            words = f"{kind}: tokens {start * tokens:,} to {end * tokens:,}{when_used}"
            marks.append(
                Mark(
                    kind=shape,
                    start=start * tokens,
                    end=end * tokens,
                    colour=PAINT[kind],
                    tooltip=words,
                )
            )
    ends = [end + 1 for end, chunk in enumerate(run.chunks, first) if "state" in chunk.kinds]
    for end in ends[-MOST_MARKS:]:
        words = f"state after {end * tokens:,} tokens{when_used}"
        marks.append(
            Mark(
                kind="tick",
                start=end * tokens,
                end=end * tokens,
                colour=PAINT["state"],
                tooltip=words,
            )
        )
    branches = f", goes on in {run.branches:,}" if run.branches else ""
    return ChartRow(name, figure + branches, marks)


def _stretches(run: Run, kind: str) -> Iterator[tuple[int, int]]:
    """Chunks one after the other that have objects of a kind: the first, and the one behind."""
    start: int | None = None
    for number, chunk in enumerate([*run.chunks, Chunk("", b"")], run.first):
        if kind in chunk.kinds:
            start = number if start is None else start
        elif start is not None:
            yield start, number
            start = None
