"""`kvpool keys`: writes the key files of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.output import fail


def keys(
    path: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace both sides' files in the folder.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 365,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Write TLS files for endpoints: an authority's, and one a side.

    JSON: a list of side, file, fingerprint (SHA-256 of its certificate) and expires.

    \b
    Example:
      kvpool keys /etc/kvpool
    """
    from disagg.runtime.keys import write_keys  # not for --help: it needs cryptography

    try:
        files = write_keys(path, days, renew=renew)
    except OSError as error:
        fail(f"{error.filename or path}: {error.strerror}.")
    except ValueError as error:
        fail(str(error))
    if as_json:
        fields = ("side", "file", "fingerprint", "expires")
        rows = [(f.side, str(f.path), f.fingerprint, f.expires.isoformat()) for f in files]
        typer.echo(json.dumps([dict(zip(fields, row)) for row in rows]))
        return
    for file in files:
        typer.echo(f"{file.path}: valid until {file.expires:%Y-%m-%d}, SHA-256 {file.fingerprint}")
    typer.echo(
        "Copy each of them to the hosts of its side only, readable by you only, and pass the\n"
        f'folder (or the file) to every endpoint: keys="{path}". Keep ca.key here.\n'
        f"Before they expire: kvpool keys {path} --renew, and copy them again.\n"
        "Endpoints that run take them without a restart."
    )
