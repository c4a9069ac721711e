"""`kvpool schema`: the JSON schema of what a command prints with --json."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Annotated, Any

import msgspec
import typer

from kvpool.cli.output import FailureJSON
from kvpool.layout.text import nearest

GROUP = "kvpool.outputs"  # entry points: a command's name, and the type of its JSON


def json_commands() -> list[str]:
    """Commands that have --json, for shell completion too."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def schema(
    command: Annotated[
        list[str],
        typer.Argument(help="Its name, such as budget or store ls.", autocompletion=json_commands),
    ],
) -> None:
    """Print the JSON schema of what a command prints with --json.

    It is the result, or the reason why there is none.

    \b
    Example:
      kvpool schema budget
    """
    name, known = " ".join(command), json_commands()
    if name not in known:
        names = ", ".join(known)
        raise typer.BadParameter(f"{name!r}: one of {names}.{nearest(name, known)}")
    typer.echo(json.dumps(schema_of(output_type(name)), indent=2))


def output_type(command: str) -> Any:
    """The type of a command's JSON. Raises KeyError for a command that has none."""
    return entry_points(group=GROUP)[command].load()


def schema_of(output: Any) -> dict[str, Any]:
    """The schema of a type, or of a FailureJSON."""
    template = "#/$defs/{name}"
    schemas, components = msgspec.json.schema_components(
        (output, FailureJSON), ref_template=template
    )
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "anyOf": list(schemas), "$defs": components}
