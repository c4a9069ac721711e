"""The `kvpool` command; packages add to it by entry points of the group `kvpool.commands`.

A command's module is imported when the command is invoked, or its options are completed.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool.cli.entries import Broken, commands, load, short_help


class _Command(TyperCommand):
    """Stands for a command until it is parsed."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name, rich_markup_mode=None)
        self._entry = entry

    def get_short_help_str(self, limit: int = 0) -> str:
        try:
            return short_help(self._entry)
        except Broken as broken:
            return str(broken)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        try:
            function = load(self._entry)
        except Broken as broken:
            if extra.get("resilient_parsing"):  # it has nothing to complete
                return super().make_context(info_name, args, parent, **extra)
            typer.echo(broken, err=True)
            raise typer.Exit(1) from None
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(self.name)(function)
        return typer.main.get_command(single).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """Lists commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known_commands = commands()
        if cmd_name in known_commands:
            return _Command(known_commands[cmd_name])
        if not ctx.resilient_parsing:
            from kvpool.layout.sentences import nearest

            ctx.fail(f"No such command {cmd_name!r}.{nearest(cmd_name, known_commands)}")
        return None


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """KV-state memory pools described to the byte, and transfers derived from them.

    With --json a command prints one JSON value on standard output, and nothing else there. What
    takes its time prints its tables on standard error besides.
    """
    if show_version:
        typer.echo(f"kvpool {version('kvpool')}")
        raise typer.Exit


def main() -> None:
    """Runs the command line."""
    app()
