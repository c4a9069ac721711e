"""How figures grow with ranks, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from disagg.cli.simulate.figures import Figures

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"fleet": "#1f78b4", "prefill": "#d95f02", "decode": "#33a02c"}
LABELS = {
    "fleet": "more engines of 2 ranks",
    "prefill": "4 decode ranks, more prefill ranks a room",
    "decode": "4 prefill ranks, more decode ranks a room",
}
Line = tuple[Callable[[Figures], float], str]
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("rooms a second, virtual", ((lambda run: run.rooms_per_second, "-"),)),
    ("messages a room", ((lambda run: run.room_messages, "-"),)),
    ("messages that waited for a rank, at most", ((lambda run: run.largest("inbox"), "-"),)),
    ("rooms open on a rank, at most", ((lambda run: run.largest("open"), "-"),)),
    (
        "bytes a peer: on decode, dashed on prefill",
        ((lambda run: run.memory.decode_peer, "-"), (lambda run: run.memory.prefill_peer, "--")),
    ),
    (
        "bytes a room: on a decode rank, dashed on prefill",
        ((lambda run: run.memory.decode_room, "-"), (lambda run: run.memory.prefill_room, "--")),
    ),
)


def write_chart(runs: Mapping[str, Sequence[Figures]], path: Path) -> None:
    """Writes the curves of all runs, by what grew; the grey line of a panel is linear. Raises
    OSError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "kvpool", "font.size": 8}):
        figure = Figure(figsize=(10, 6), layout="constrained")
        for axis, (title, lines) in zip(figure.subplots(2, 3).flat, PANELS):
            for what, series in runs.items():
                ranks = [run.ranks for run in series]
                for value, style in lines:
                    label = LABELS[what] if style == "-" else None
                    heights = [value(run) for run in series]
                    axis.plot(ranks, heights, style, color=COLOURS[what], marker=".", label=label)
            low, high = axis.get_ylim()
            first = min(run.ranks for series in runs.values() for run in series)
            last = max(run.ranks for series in runs.values() for run in series)
            start = max(low, 1e-3)
            axis.plot([first, last], [start, start * last / first], color="#bbb", linewidth=1)
            axis.set(title=title, xscale="log", yscale="log", xlabel="ranks")
            axis.set_ylim(start / 1.5, max(high, 2 * start) * 2)
            axis.set_xticks([run.ranks for run in next(iter(runs.values()))])
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(_none())
            axis.grid(color="#eee")
            axis.spines[["top", "right"]].set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        known = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=known, dpi=150)


def _none() -> object:
    from matplotlib.ticker import NullLocator

    return NullLocator()
