"""`kvpool keys`: writes the key files of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.runtime.keys import write_keys


def keys(
    path: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
) -> None:
    """Write the keys that encrypt control messages, a file a side.

    \b
    Example:
      kvpool keys /etc/kvpool
    """
    try:
        made = write_keys(path)
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
    for each in made:
        typer.echo(f"{path / each.side}.key: public key {each.public}")
    typer.echo("Copy each file to the hosts of its side only, readable by you only, and pass the")
    typer.echo(f'folder (or the file) to every endpoint: keys="{path}".')
