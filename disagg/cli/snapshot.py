"""`kvpool snapshot`: what the files of `disagg.snapshot` hold."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.snapshot import SnapshotRefused, check, inspect

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.snapshot import Header


class Action(str, Enum):
    """What to do with a file."""

    show = "show"
    check = "check"


def snapshot(
    action: Annotated[
        Action,
        typer.Argument(
            help="show: what the header says. check: and whether all data are as saved."
        ),
    ],
    files: Annotated[list[Path], typer.Argument(help="Files of disagg.snapshot.save.")],
) -> None:
    """Show what snapshot files hold, or check them.

    Exit status 1 if a file is refused; the reason is printed, and the other files are read.
    """
    from rich.console import Console

    console, refused = Console(soft_wrap=True), False
    for path in files:
        try:
            header = check(path) if action is Action.check else inspect(path)
        except (SnapshotRefused, OSError) as error:
            reason = f"{path}: {error.strerror}." if isinstance(error, OSError) else error
            typer.echo(f"refused: {reason}", err=True)
            refused = True
            continue
        if action is Action.check:
            console.print(f"{path}: sound, {_summary(header)}", markup=False, highlight=False)
        else:
            _show(console, path, header)
    if refused:
        raise typer.Exit(1)


def _summary(header: Header) -> str:
    request = f" of request {header.request!r}" if header.request else ""
    model = f" of model {header.layout.model!r}" if header.layout.model else ""
    return f"{header.tokens:,} tokens{request}{model}, {header.data_bytes:,} bytes of state"


def _show(console: Console, path: Path, header: Header) -> None:
    from kvpool.render.text import layout_table, space_words

    console.print(f"{path}: {_summary(header)}", markup=False, highlight=False)
    for space in header.layout.spaces:
        console.print(f"  {space_words(space)}", markup=False, highlight=False)
    for name, value in header.conventions.items():
        console.print(f"  {name}: {value}", markup=False, highlight=False)
    console.print(layout_table(header.layout, "tensors, as they lie in the file"))
