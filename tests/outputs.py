"""What commands print with --json is of the type whose schema `kvpool schema` prints."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvpool.cli.schema import output_type


def of_type(text: str, kind: Any) -> Any:
    """The JSON value, which has all that the type has and nothing else."""
    value = json.loads(text)
    assert json.loads(msgspec.json.encode(msgspec.convert(value, kind))) == value
    return value


def output_of(command: str, text: str) -> Any:
    """What a command printed, which must be of its type."""
    return of_type(text, output_type(command))
