"""The `kvpool` command; packages add to it by entry points of the group `kvpool.commands`.

A command's module is imported when the command is invoked, or its options are completed. Files that
commands write because an option names them are checked and written here.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool.cli.output import fail, failures_as_json
from kvpool.extras import EXTRAS, needs


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
            fail(str(broken))
        group = function  # a command of several is an app of its own
        if not isinstance(group, typer.Typer):
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            group.command(self.name)(function)
        return typer.main.get_command(group).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """Lists commands by name, and says in JSON why one fails that was asked for JSON."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        ctx.meta["as_json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.meta["as_json"]
        with failures_as_json(ctx.info_name or "kvpool") if as_json else nullcontext():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known_commands = commands()
        if cmd_name in known_commands:
            return _Command(known_commands[cmd_name])
        if not ctx.resilient_parsing:
            from kvpool.layout.text import nearest  # and with it numpy

            ctx.fail(f"No such command {cmd_name!r}.{nearest(cmd_name, known_commands)}")
        return None


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """KV-state memory pools described to the byte, and transfers derived from them.

    With --json a command prints one JSON value on standard output, and nothing else there: its
    result, or {"error": {"kind", "message", "exit_status"}}. Slow commands also print their tables
    on standard error. `kvpool schema COMMAND` prints the JSON schema.
    """
    if show_version:
        typer.echo(f"kvpool {version('kvpool')}")
        raise typer.Exit


class Broken(Exception):
    """A command that cannot be loaded; the message names it, its package and the error."""


def commands() -> dict[str, EntryPoint]:
    """Entry points of the installed commands, by name; none is imported."""
    entries = sorted(entry_points(group="kvpool.commands"), key=lambda entry: entry.name)
    return {entry.name: entry for entry in entries}


def offered_by(entry: EntryPoint) -> str:
    """The package that has an entry point."""
    return entry.dist.name if entry.dist else entry.module


def short_help(entry: EntryPoint) -> str:
    """The first sentence of a command's docstring, read in its source; of an app of several
    commands, that of its callback. Nothing is imported.

    Empty where there is no source, or it does not say it. Raises Broken where there is no module.
    """
    try:
        origin = _spec(entry.module).origin or ""
        source = Path(origin).read_bytes() if origin.endswith(".py") else b""
        body = ast.parse(source).body
    except Exception as error:
        raise _broken(entry, error) from None
    callback = f"{entry.attr}.callback("
    for node in (node for node in body if isinstance(node, ast.FunctionDef)):
        if node.name == entry.attr or any(
            ast.unparse(decorator).startswith(callback) for decorator in node.decorator_list
        ):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(first.split()).partition(". ")[0]
    return ""


def absent(entry: EntryPoint, error: Exception) -> str:
    """That an entry point needs a package that is not installed, if the error says so; empty for
    the entry point's own package.
    """
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    top = name.partition(".")[0]
    if top in ("", entry.module.partition(".")[0]):
        return ""
    return needs(top) if top in EXTRAS else f"needs {top}, which is not installed."


def load(entry: EntryPoint) -> Callable[..., Any] | typer.Typer:
    """Imports a command, or an app of several. Raises Broken."""
    try:
        return entry.load()  # type: ignore[no-any-return]
    except Exception as error:  # of a package that is not ours
        raise _broken(entry, error) from None


def _broken(entry: EntryPoint, error: Exception) -> Broken:
    reason = absent(entry, error) or f"is broken: {type(error).__name__}: {error}"
    return Broken(f"command {entry.name!r} of package {offered_by(entry)} {reason}")


def _spec(module: str) -> ModuleSpec:
    """Where a module is; unlike importlib.util.find_spec, without importing its packages."""
    package = module.rpartition(".")[0]
    path = (_spec(package).submodule_search_locations or []) if package else None
    specs = (finder.find_spec(module, path) for finder in sys.meta_path)
    spec = next((candidate for candidate in specs if candidate is not None), None)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    return spec


def check_output(option: str, path: Path | None, suffixes: Collection[str] = ()) -> None:
    """Refuses, before the work, a file that could not be written after it: one that ends in none
    of `suffixes` (if there are any), or whose directory is not there.

    Raises typer.BadParameter. Without a path there is nothing to check.
    """
    if path is None:
        return
    folder, problem = path.absolute().parent, ""
    if suffixes and path.suffix not in suffixes:
        problem = f"the name must end in {' or '.join(suffixes)}"
    elif path.is_dir():
        problem = "that is a directory; give a file in it"
    elif not folder.is_dir():
        problem = "there is no such directory"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "it may not be written"
    if problem:
        raise typer.BadParameter(f"{option} {path}: {problem}.")


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a file that an option names, and says so on stderr. Raises typer.BadParameter."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{option} {path}: {error.strerror}.") from None
    typer.echo(f"wrote {path}", err=True)
