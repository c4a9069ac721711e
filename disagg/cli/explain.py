"""`kvpool explain`: how bytes travel between layouts that are given as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.plan import IncompatibleLayouts, plan
from kvpool.layout import PoolLayout
from kvpool.layout.codec import read_file


def explain(
    layouts: Annotated[
        list[Path],
        typer.Argument(help="Layout files: one per prefill rank, then decode's."),
    ],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Length of the request.")] = 2048,
) -> None:
    """Explain the transfer between layouts: files of PoolLayout.to_json or to_msgpack.

    Exit status 1 if decode cannot be filled; all reasons are listed.
    """
    from rich.console import Console

    if len(layouts) < 2:
        raise typer.BadParameter("give at least two layouts: the prefill ranks', then decode's.")
    *sources, dest = [_read(path) for path in layouts]
    try:
        made = plan(sources, dest)
    except IncompatibleLayouts as error:
        typer.echo(f"refused: {error}")
        raise typer.Exit(1) from None
    Console().print(made.explain(tokens).table())


def _read(path: Path) -> PoolLayout:
    try:
        layout = read_file(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if layout is None:
        raise typer.BadParameter(f"{path}: neither a JSON nor a msgpack layout.")
    return layout
