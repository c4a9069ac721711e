"""`kvpool store check`: whether all objects are as their writers wrote them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.store.common import AsJson, Url, bar, full_namespace, opened
from kvpool.layout.text import counted

if TYPE_CHECKING:
    from disagg.store.upkeep.check import ObjectVerdict

_DELETE = "Remove what is damaged or cut: no engine can read it. It is read once more before."
_ONLY = "Only what is in this namespace (its first digits)."


def check(
    url: Url,
    delete: Annotated[bool, typer.Option("--delete", help=_DELETE)] = False,
    only: Annotated[str | None, typer.Option("--namespace", help=_ONLY)] = None,
    as_json: AsJson = False,
) -> None:
    """Read all objects, and compare the digests of their heads and blocks.

    An engine checks all it reads, and takes what is damaged for absent: a store with damage in it
    gives fewer hits, and never wrong state. Damaged: not what its name, head or digests say. Cut:
    shorter than it says. Foreign: not named as a store's, or of a geometry that this kvpool cannot
    read; it is never removed.

    All bytes of the store are read, which counts as no use to kvpool store gc.

    Exit status 1 if something is damaged or cut and was left there.

    JSON: url; counts by state (sound, damaged, cut, foreign, gone); bytes, of all; problems (name,
    state, nbytes, why) of what is not sound; deleted (names).

    \b
    Example:
      kvpool store check file:///cache --delete
    """
    from disagg.store.upkeep.check import check as check_one, check_all
    from disagg.store.upkeep.inventory import taken

    counts: Counter[str] = Counter()
    problems: list[ObjectVerdict] = []
    deleted: list[str] = []
    nbytes = 0
    with opened(url) as floor:
        entries = list(floor.list(""))
        inventory = taken(floor, entries)
        if only is not None:
            prefix = f"{full_namespace(inventory, only)}/"
            entries = [entry for entry in entries if entry.name.startswith(prefix)]
        with bar(len(entries)) as tell:
            pairs = zip(entries, check_all(floor, entries, inventory.namespaces))
            for number, (entry, verdict) in enumerate(pairs, 1):
                tell("checking", number)
                if delete and verdict.useless:
                    # it may have been replaced while it was read
                    verdict = check_one(floor, entry, inventory.namespaces)
                    if verdict.useless:
                        floor.delete([entry.name])
                        deleted.append(entry.name)
                counts[verdict.state] += 1
                nbytes += verdict.nbytes
                if verdict.state != "sound":
                    problems.append(verdict)
    if as_json:
        typer.echo(json.dumps({"url": url, **_as_dict(counts, nbytes, problems, deleted)}))
    else:
        _print(url, counts, nbytes, problems)
        if deleted:
            typer.echo(f"removed {counted(len(deleted), 'object')}.")
    if any(verdict.useless for verdict in problems) and not delete:
        raise typer.Exit(1)


def _as_dict(
    counts: Counter[str], nbytes: int, problems: list[ObjectVerdict], deleted: list[str]
) -> dict[str, object]:
    from disagg.store.upkeep.check import STATES

    return {
        "counts": {state: counts[state] for state in STATES},
        "bytes": nbytes,
        "problems": [asdict(verdict) for verdict in problems],
        "deleted": deleted,
    }


def _print(url: str, counts: Counter[str], nbytes: int, problems: list[ObjectVerdict]) -> None:
    from disagg.store.upkeep.check import STATES
    from kvpool.layout.text import one_line
    from kvpool.layout.units import human

    for verdict in problems:
        why = one_line(verdict.why, 500)
        typer.echo(f"{verdict.state}: {verdict.name}: {why}".removesuffix(": "))
    words = ", ".join(f"{counts[state]:,} {state}" for state in STATES if counts[state])
    objects = counted(sum(counts.values()), "object")
    typer.echo(f"{url}: {objects}, {human(nbytes)}: {words or 'nothing is there'}.")
