"""`kvpool keys`: writes the key files of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from disagg.runtime.keys import write_keys


def keys(
    path: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Write the keys that encrypt control messages, a file a side.

    JSON: a list of side, file and public key (public).

    \b
    Example:
      kvpool keys /etc/kvpool
    """
    try:
        made = write_keys(path)
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
    files = {each: str(path / f"{each.side}.key") for each in made}
    if as_json:
        found = [{"side": k.side, "file": file, "public": k.public} for k, file in files.items()]
        typer.echo(json.dumps(found))
        return
    for each, file in files.items():
        typer.echo(f"{file}: public key {each.public}")
    typer.echo("Copy each file to the hosts of its side only, readable by you only, and pass the")
    typer.echo(f'folder (or the file) to every endpoint: keys="{path}".')
