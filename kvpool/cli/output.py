"""How commands fail: a sentence on standard error, and with --json an object on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from typing_extensions import TypedDict

from kvpool.extras import missing


class Error(TypedDict):
    """`kind` is "usage" for wrong arguments, "failed" where a command could not do its work, else
    the class of an exception.
    """

    kind: str
    message: str
    exit_status: int


class FailureJSON(TypedDict):
    """What a command prints with --json where it has no result."""

    error: Error


class Failed(typer.Exit):
    """A command could not do its work, and has said why."""

    def __init__(self, message: str) -> None:
        super().__init__(1)
        self.message = message


def fail(message: str) -> NoReturn:
    """Ends a command with status 1 and the reason."""
    typer.echo(message, err=True)
    raise Failed(message)


@contextmanager
def failures_as_json(command: str) -> Iterator[None]:
    """Prints a FailureJSON for what ends a command, and lets it go on. A status without a reason is
    that of a command that has printed a result.
    """
    try:
        yield
    except Failed as failure:
        _print(Error(kind="failed", message=failure.message, exit_status=failure.exit_code))
        raise
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        _print(_reason(command, error))
        raise


def _reason(command: str, error: Exception) -> Error:
    if isinstance(error, ImportError):
        return Error(kind="failed", message=str(missing(command, error)), exit_status=1)
    # typer does not export what its own errors have in common
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return Error(kind="usage", message=error.format_message(), exit_status=error.exit_code)
    return Error(kind=type(error).__name__, message=str(error), exit_status=1)


def _print(error: Error) -> None:
    typer.echo(json.dumps(FailureJSON(error=error)))
