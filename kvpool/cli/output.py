"""Files that commands write because an option names them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import typer


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
