"""`kvpool snapshot`: what the files of `disagg.snapshot` hold."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg.snapshot import Header, SnapshotRefused, check, inspect

_ACTIONS = "show: what the header says. check: and whether all data are as saved."


class Action(str, Enum):
    """What to do with a file."""

    show = "show"
    check = "check"


def snapshot(
    action: Annotated[Action, typer.Argument(help=_ACTIONS)],
    files: Annotated[list[Path], typer.Argument(help="Files of disagg.snapshot.save.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show what snapshot files hold, or check them.

    Exit status 1 if a file is refused; the reason is printed, and the other files are read.

    JSON: a list of file, request, tokens, data_bytes, conventions and layout, or of file and
    refused, the reason.

    \b
    Example:
      kvpool snapshot check request.kv
    """
    headers, refused = list[dict[str, Any]](), False
    for path in files:
        try:
            header = check(path) if action is Action.check else inspect(path)
        except (SnapshotRefused, OSError) as error:
            reason = f"{path}: {error.strerror}." if isinstance(error, OSError) else error
            typer.echo(f"refused: {reason}", err=True)
            headers.append({"file": str(path), "refused": str(reason)})
            refused = True
            continue
        if as_json:
            facts = {
                "file": str(path),
                "request": header.request,
                "tokens": header.tokens,
                "data_bytes": header.data_bytes,
                "conventions": dict(header.conventions),
                "layout": json.loads(header.layout.to_json()),
            }
            headers.append(facts)
        elif action is Action.check:
            typer.echo(f"{path}: sound, {_summary(header)}")
        else:
            _show(path, header)
    if as_json:
        typer.echo(json.dumps(headers))
    if refused:
        raise typer.Exit(1)


def _summary(header: Header) -> str:
    request = f" of request {header.request!r}" if header.request else ""
    model = f" of model {header.layout.model!r}" if header.layout.model else ""
    return f"{header.tokens:,} tokens{request}{model}, {header.data_bytes:,} bytes of state"


def _show(path: Path, header: Header) -> None:
    from rich.console import Console

    from kvpool.render.text import layout_table, space_words

    typer.echo(f"{path}: {_summary(header)}")
    for space in header.layout.spaces:
        typer.echo(f"  {space_words(space)}")
    for name, value in header.conventions.items():
        typer.echo(f"  {name}: {value}")
    Console().print(layout_table(header.layout, "tensors, as they lie in the file"), crop=False)
