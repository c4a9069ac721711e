"""`kvpool keys`: writes the key file of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.runtime.keys import write_keys


def keys(
    path: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
) -> None:
    """Write the keys that encrypt control messages: one file for all endpoints."""
    try:
        made = write_keys(path)
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{path}: public key {made.public}. Copy it to every host, readable by you only,")
    typer.echo(f'and pass it to every endpoint: keys="{path}".')
