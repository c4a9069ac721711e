"""Commands as entry points: what their source says of them, unexecuted, and loading one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from kvpool.extras import EXTRAS, needs


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
    """The first sentence of a command's docstring, read in its source. Nothing is imported.

    Empty where there is no source, or it does not say it. Raises Broken where there is no module.
    """
    try:
        origin = _spec(entry.module).origin or ""
        source = Path(origin).read_bytes() if origin.endswith(".py") else b""
        body = ast.parse(source).body
    except Exception as error:
        raise _broken(entry, error) from None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
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


def load(entry: EntryPoint) -> Callable[..., Any]:
    """Imports a command. Raises Broken."""
    try:
        command: Callable[..., Any] = entry.load()
    except Exception as error:  # of a package that is not ours
        raise _broken(entry, error) from None
    return command


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
