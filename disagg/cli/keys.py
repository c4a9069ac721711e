"""`kvpool keys`: writes the key files of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from disagg.runtime.keys import SIDE_DAYS, renew_keys, write_keys


def keys(
    path: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace both sides' files in the folder.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = SIDE_DAYS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Write the files with which endpoints use TLS: an authority's, and one a side.

    JSON: a list of side, file, fingerprint (SHA-256 of its certificate) and expires.

    \b
    Example:
      kvpool keys /etc/kvpool
    """
    try:
        files = renew_keys(path, days) if renew else write_keys(path, days)
    except OSError as error:
        typer.echo(f"{error.filename or path}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        listed = [
            {
                "side": file.side,
                "file": str(file.path),
                "fingerprint": file.fingerprint,
                "expires": file.expires.isoformat(),
            }
            for file in files
        ]
        typer.echo(json.dumps(listed))
        return
    for file in files:
        typer.echo(f"{file.path}: valid until {file.expires:%Y-%m-%d}, SHA-256 {file.fingerprint}")
    typer.echo("Copy each of them to the hosts of its side only, readable by you only, and pass")
    typer.echo(f'the folder (or the file) to every endpoint: keys="{path}". Keep ca.key here.')
    typer.echo(f"Before they expire: kvpool keys {path} --renew, then copy again. Endpoints read")
    typer.echo("them again by themselves.")
