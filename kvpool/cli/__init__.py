"""The `kvpool` command; packages add to it by entry points of the group `kvpool.commands`."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Imports the module of a command when the command is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(entry_points(group="kvpool.commands").names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for entry in entry_points(group="kvpool.commands", name=cmd_name):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(entry.load())
            return typer.main.get_command(single)
        return None


app = typer.Typer(
    cls=_Commands,
    help="KV-state memory pools described to the byte, and transfers derived from them.",
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
    app()
