"""How figures grow with ranks, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.fleet.figures import Figures

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".svg", ".png")
COLOURS = {"fleet": "#1f78b4", "prefill": "#d95f02", "decode": "#33a02c", "both": "#6a3d9a"}
LABELS = {
    "fleet": "more engines",
    "prefill": "more prefill ranks a room, beside 4 of decode",
    "decode": "more decode ranks a room, beside 4 of prefill",
    "both": "more ranks a room on both sides",
}
MIN_HEIGHT = 0.01
"""What is less is drawn there: a logarithmic axis has no zero."""
Line = tuple[Callable[[Figures], float], str]
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("rooms a second, virtual", ((lambda run: run.rooms_per_second, "-"),)),
    ("messages a room", ((lambda run: run.room_messages, "-"),)),
    ("hellos, pings and answers a room", ((lambda run: run.link_messages, "-"),)),
    ("messages waiting on a rank, at most", ((lambda run: run.largest("inbox"), "-"),)),
    (
        "bytes a peer: decode, dashed prefill",
        ((lambda run: run.memory.decode_peer, "-"), (lambda run: run.memory.prefill_peer, "--")),
    ),
    (
        "bytes a room: decode, dashed prefill",
        ((lambda run: run.memory.decode_room, "-"), (lambda run: run.memory.prefill_room, "--")),
    ),
)


def write_chart(runs: Mapping[str, Sequence[Figures]], path: Path) -> None:
    """Writes the curves of all runs, by what grew; the grey line of a panel is linear. Raises
    OSError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "kvpool", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(10, 6), layout="constrained")
        for axis, (title, lines) in zip(figure.subplots(2, 3).flat, PANELS):
            axis.set_title(title, fontsize=9)
            _draw(axis, runs, lines)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        known = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=known, dpi=150)


def _draw(axis: Any, runs: Mapping[str, Sequence[Figures]], lines: Sequence[Line]) -> None:
    """One panel, and what would be linear, in grey."""
    from matplotlib.ticker import NullLocator

    xs: list[int] = []
    ys: list[float] = []
    axis.set(xscale="log", yscale="log", xlabel="ranks")
    for what, series in runs.items():
        ranks = [run.grown(what) for run in series]
        for value, style in lines:
            heights = [max(value(run), MIN_HEIGHT) for run in series]
            label = LABELS[what] if style == "-" else None
            axis.plot(ranks, heights, style, color=COLOURS[what], marker=".", label=label)
            xs, ys = sorted({*xs, *ranks}), sorted([*ys, *heights])
    axis.plot([xs[0], xs[-1]], [ys[0], ys[0] * xs[-1] / xs[0]], color="#bbb", linewidth=1, zorder=0)
    axis.set_ylim(ys[0] / 2, max(2 * ys[-1], 100 * ys[0]))
    axis.set_xticks([rank for rank in xs if rank & (rank - 1) == 0])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:,g}")
    for each in (axis.xaxis, axis.yaxis):
        each.set_minor_locator(NullLocator())
    axis.grid(color="#eee")
    axis.spines[["top", "right"]].set_visible(False)
