"""`kvpool store gc`: removes what was used least recently."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.store.common import AsJson, Url, bar, opened, parsed, used_word, when
from kvpool.layout.text import counted

if TYPE_CHECKING:
    from disagg.store.floors.base import Floor
    from disagg.store.upkeep.collect import Removal
    from disagg.store.upkeep.tree import Forest

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
SWEPT_SECONDS = 3600.0
"""What writers began longer ago, and have not completed, is of writers that were killed."""

_KEEP = "How many bytes of objects may stay: 200GiB."
_OLDER = "Also remove what has not been used for so long: 90m, 12h, 30d, 8w."


def gc(
    url: Url,
    keep: Annotated[str | None, typer.Option(help=_KEEP)] = None,
    older: Annotated[str | None, typer.Option(help=_OLDER)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what was used least recently, until what is left has at most --keep bytes.

    Whole chunks are removed, all their objects. A chunk counts as used when one that follows it in
    a prompt was: without it, those are not found. Of chunks used in the same minute the deepest in
    their prompts go first. Folders note when objects are read (to the minute); for s3://, gs:// and
    az:// the time is when they were written. Unfinished files of killed writers are removed too;
    catalogues and what is not a store's stay. Engines may go on: they compute what is gone.

    Mooncake's master evicts by itself: there is nothing to do here for mooncake://.

    Exit status 1 if the store does not answer.

    JSON: url, dry_run; removed (chunks, objects, bytes); kept (chunks, bytes); oldest (of what is
    kept, when it was last used, in seconds since 1970, or null); swept (unfinished files).

    \b
    Examples:
      kvpool store gc file:///cache --keep 200GiB
      kvpool store gc s3://bucket/cache --keep 2TiB --older 30d --dry-run
    """
    from disagg.store.upkeep.collect import choose, last_uses, remove
    from kvpool.layout.units import parse_memory

    if parsed(url).scheme == "mooncake":
        raise typer.BadParameter(
            f"{url}: Mooncake's master evicts by itself when memory is full, what was used least "
            "recently first. kvpool store gc is for file://, s3://, gs:// and az://."
        )
    if keep is None and older is None:
        raise typer.BadParameter("give --keep, how many bytes may stay, or --older, or both.")
    try:
        most = None if keep is None else parse_memory(keep, "--keep")
        since = None if older is None else time.time() - parse_age(older)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with opened(url) as floor:
        forest = _forest(floor, most, since)
        try:
            removal = choose(forest, keep=most, unused_since=since)
        except ValueError as error:
            raise typer.BadParameter(f"{url}: {error}") from None
        swept = 0
        if not dry_run:
            with bar(len(removal.chunks)) as tell:
                remove(floor, removal.chunks, tell)
            swept = floor.sweep(SWEPT_SECONDS)
    gone = set(removal.chunks)
    uses = (used for chunk, used in last_uses(forest).items() if chunk not in gone and used)
    _tell(url, removal, min(uses, default=None), swept=swept, dry_run=dry_run, as_json=as_json)


def _forest(floor: Floor, most: int | None, since: float | None) -> Forest:
    """All chunks; as trees, which takes reading their heads, if any are to be removed."""
    from disagg.store.upkeep.tree import Forest, chunks_of, read_forest

    chunks = chunks_of(floor.list(""))
    old = since is not None and any((chunk.used or 0) < since for chunk in chunks)
    if old or (most is not None and sum(chunk.nbytes for chunk in chunks) > most):
        with bar(len(chunks)) as tell:
            return read_forest(floor, chunks, tell)
    return Forest((), (), tuple(chunks))


def parse_age(text: str) -> float:
    """Seconds of `90m`, `12h`, `30d`. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([smhdw])", text.strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(
            f"--older {text!r}: a number of seconds, minutes, hours, days or weeks, such as 90m, "
            "12h, 30d or 8w."
        )
    return seconds


def _tell(
    url: str, removal: Removal, oldest: float | None, *, swept: int, dry_run: bool, as_json: bool
) -> None:
    from kvpool.layout.units import human

    if as_json:
        sizes = {"objects": removal.objects, "bytes": removal.nbytes}
        fields = {
            "url": url,
            "dry_run": dry_run,
            "removed": {"chunks": len(removal.chunks), **sizes},
            "kept": {"chunks": removal.kept_chunks, "bytes": removal.kept_bytes},
            "oldest": oldest,
            "swept": swept,
        }
        typer.echo(json.dumps(fields))
        return
    verb = "would remove" if dry_run else "removed"
    gone = f"{counted(len(removal.chunks), 'chunk')}, {counted(removal.objects, 'object')}"
    typer.echo(f"{url}: {verb} {gone}, {human(removal.nbytes)}.")
    last = f", last {used_word(url)} {when(oldest)} UTC or later" if oldest else ""
    kept = f"{counted(removal.kept_chunks, 'chunk')}, {human(removal.kept_bytes)}"
    typer.echo(f"kept: {kept}{last}.")
    if swept:
        typer.echo(f"removed {counted(swept, 'unfinished file')} of killed writers.")
