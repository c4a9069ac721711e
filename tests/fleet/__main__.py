"""`make simulate`: a fleet of endpoints in one process, in virtual time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.output import check_output
from kvpool.extras import needs

if TYPE_CHECKING:
    from rich.console import Console

    from tests.fleet.figures import Figures
    from tests.fleet.spec import Spec

WHAT_GROWS = ("fleet", "prefill", "decode", "both")


def simulate(
    prefill: Annotated[int, typer.Option(help="Prefill ranks.")] = 16,
    decode: Annotated[int, typer.Option(help="Decode ranks.")] = 32,
    prefill_tp: Annotated[int, typer.Option(help="Ranks of one prefill engine.")] = 2,
    decode_tp: Annotated[int, typer.Option(help="Ranks of one decode engine.")] = 2,
    rooms: Annotated[int, typer.Option(help="Rooms in all.")] = 10_000,
    in_flight: Annotated[int, typer.Option(help="Rooms of a decode engine at a time.")] = 16,
    tokens: Annotated[int, typer.Option(help="Mean length of a request.")] = 1024,
    chunks: Annotated[int, typer.Option(help="Chunks of a request.")] = 1,
    compute: Annotated[float, typer.Option(help="Mean seconds of a prefill.")] = 0.1,
    latency: Annotated[float, typer.Option(help="Mean seconds of a message.")] = 200e-6,
    rate: Annotated[float, typer.Option(help="Bytes a second of a rank's port.")] = 50e9,
    turn: Annotated[float, typer.Option(help="Seconds of a rank's thread for a message.")] = 20e-6,
    loss: Annotated[float, typer.Option(help="Part of the messages that get lost.")] = 0.0,
    deaths: Annotated[int, typer.Option(help="Ranks that die and restart.")] = 0,
    peer_timeout: Annotated[float, typer.Option(help="Seconds of silence of a dead peer.")] = 10.0,
    unused: Annotated[
        float, typer.Option(help="Seconds without a room after which decode disconnects.")
    ] = 120.0,
    model: Annotated[
        str, typer.Option(help="Layouts of this model (a config): pages only. Default: 4 layers.")
    ] = "",
    groups: Annotated[
        bool, typer.Option(help="Decode ranks know their group, and ask only ranks that they need.")
    ] = True,
    seed: Annotated[int, typer.Option(help="All that is random follows from it.")] = 0,
    grow: Annotated[
        list[str] | None,
        typer.Option(help="What to let grow instead: fleet, prefill, decode, both; repeatable."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="With --grow: up to so many ranks, from 8.")] = 1024,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as one JSON list; tables on stderr.")
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(help="With --grow: draw the curves to a .svg or .png file.")
    ] = None,
) -> None:
    """Simulate a fleet of real endpoints in virtual time.

    Plans are real too; memory is not there.

    A room is one request, from one prefill engine to one decode engine. When one ends, its decode
    engine begins the next, from a prefill engine at random. Messages and reads take time, messages
    get lost, ranks die and restart. The same options give the same run, and the same trace.

    Every run checks itself: each room ends once on every rank, no page stays leased, nothing is
    read from pages that are no longer the room's and counted as a success, without faults nothing
    fails.

    With --grow, runs of 8 ranks, 16 and so on: `fleet` has more engines, `prefill` and `decode` one
    engine that gets larger beside one of 4 ranks, `both` one engine on each side.

    Exit status 1 if a check failed. Seconds and bytes of this machine vary a little between
    versions of Python; all else does not.

    JSON: a list of runs (spec; seconds and busy_seconds, virtual; cpu_seconds; parts, rooms of
    ranks by end; failures by side and kind; room_seconds, median and 99 of 100; sent and nbytes of
    messages by type; lost; links; peaks by side; memory in bytes; plans known and made;
    plan_seconds; trace; broken, what a check found; room_messages, room_bytes and link_messages a
    room).

    \b
    Example:
      python -m tests.fleet --prefill 128 --decode 256 --rooms 2000 --deaths 8
    """
    from rich.console import Console

    from kvpool.layout.sentences import nearest
    from tests.fleet.chart import SUFFIXES, write_chart
    from tests.fleet.figures import to_json
    from tests.fleet.report import growth_table, one_table
    from tests.fleet.spec import Spec

    for what in grow or ():
        if what not in WHAT_GROWS:
            known = ", ".join(WHAT_GROWS)
            raise typer.BadParameter(f"--grow {what}: one of {known}.{nearest(what, WHAT_GROWS)}")
    if chart is not None:
        if not grow:
            raise typer.BadParameter("--chart draws what --grow measures: add --grow fleet.")
        check_output("--chart", chart, SUFFIXES)
        if find_spec("matplotlib") is None:
            raise typer.BadParameter(f"--chart {needs('matplotlib')}")
    try:
        spec = Spec(
            *(prefill, decode, prefill_tp, decode_tp, rooms, in_flight, tokens, chunks, compute),
            *(latency, rate, turn, loss, deaths, peer_timeout),
            unused=unused,
            model=model,
            seed=seed,
            groups=groups,
        )
        for side in ("prefill", "decode"):
            spec.layout(side, 0)
        series = {what: list(spec.growing(what, ranks)) for what in dict.fromkeys(grow or ())}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if grow and ranks < 8:
        raise typer.BadParameter(f"--ranks {ranks}: 8 or more.")
    console, progress = Console(stderr=as_json), Console(stderr=True)
    if series:
        runs = {what: _run(specs, progress) for what, specs in series.items()}
        for what, found in runs.items():
            console.print(growth_table(what, found), crop=False)
        if chart is not None:
            write_chart(runs, chart)
            typer.echo(f"wrote {chart}", err=True)
    else:
        runs = {"": _run([spec], progress)}
        console.print(one_table(runs[""][0]), crop=False)
    every = [run for found in runs.values() for run in found]
    if as_json:
        typer.echo(to_json(every))
    broken = [f"{run.ranks} ranks: {line}" for run in every for line in run.broken]
    for line in broken:
        typer.echo(f"broken: {line}", err=True)
    if broken:
        raise typer.Exit(1)


def _run(specs: list[Spec], console: Console) -> list[Figures]:
    """Runs fleets one after another, with a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from tests.fleet.fleet import Fleet

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("rooms of {task.description}")
    hidden, found = not console.is_terminal, []
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        for spec in specs:
            words = f"{spec.prefill:,} x {spec.decode:,} ranks"
            task = progress.add_task(words, total=spec.rooms)
            found.append(Fleet(spec, lambda n: progress.update(task, completed=n)).run())  # noqa: B023
            progress.remove_task(task)
    return found


if __name__ == "__main__":
    typer.run(simulate)
