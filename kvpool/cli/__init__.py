"""The `kvpool` command; packages add to it by entry points of the group `kvpool.commands`."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from typing import Annotated

import typer

app = typer.Typer(
    help="KV-state memory pools that say what their bytes are, and transfers derived from it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"kvpool {version('kvpool')}")
        raise typer.Exit


def main() -> None:
    """Runs the command line."""
    for entry in sorted(entry_points(group="kvpool.commands"), key=lambda entry: entry.name):
        app.command(entry.name)(entry.load())
    app()
