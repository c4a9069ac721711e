"""What the commands of `kvpool store` share: floors opened to be looked at, names, times, bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.output import fail

if TYPE_CHECKING:
    from disagg.store.floors.base import Floor
    from disagg.store.floors.url import FloorURL
    from disagg.store.upkeep.inventory import Held, Inventory

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: file:///path, s3://bucket/...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def parsed(url: str) -> FloorURL:
    """Raises typer.BadParameter for what names no store that another process could have."""
    from disagg.store.floors.url import parse_url

    try:
        parts = parse_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if parts.scheme == "memory":
        raise typer.BadParameter(
            f"{url} lies in the memory of the process that opened it; this command is another. Use "
            "file:///path for a store that several processes have."
        )
    return parts


@contextmanager
def opened(url: str) -> Iterator[Floor]:
    """A floor to look at: what is read there does not count as used. Ends the command with status 1
    and the reason where there is none, or where it does not answer.
    """
    from disagg.store.floors import open_floor
    from disagg.store.floors.base import FloorError
    from kvpool.extras import MissingExtra

    parts = parsed(url)
    try:
        if parts.scheme == "file" and not os.path.isdir(parts.path):
            raise FloorError(f"{url}: there is no such folder.")  # which opening it would create
        with closing(open_floor(url, notes_use=False)) as floor:
            yield floor
    except (FloorError, MissingExtra) as error:
        fail(str(error))


@contextmanager
def bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr, where that is a terminal: `tell(what, done)`."""
    from rich.console import Console

    from disagg.cli.common import progress_bar

    with progress_bar(Console(stderr=True), total) as tell:
        yield tell


def full_namespace(inventory: Inventory, name: str) -> str:
    """The namespace whose digits begin so. Raises typer.BadParameter."""
    matches = [namespace for namespace in inventory.namespaces if namespace.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = ", ".join(namespace[:16] for namespace in matches)
        raise typer.BadParameter(
            f"{name}: several namespaces begin so: {several}. Give more digits."
        )
    names = ", ".join(namespace[:12] for namespace in inventory.namespaces) or "none"
    raise typer.BadParameter(f"{name}: no namespace of this store begins so; it has {names}.")


def when(seconds: float | None) -> str:
    """A time, to the minute, UTC."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def used_word(url: str) -> str:
    """What the times of a floor say: only folders note when objects are read."""
    return "used" if parsed(url).scheme == "file" else "written"


def model_words(namespace: Held) -> str:
    """The model of a namespace, as its conventions say."""
    text = namespace.text
    return "-" if text is None else str(text["model"] or "-")
