"""`kvpool store ls`: what a store holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.store.common import AsJson, Url, bar, model_words, opened, used_word, when
from kvpool.cli import check_output, write_output
from kvpool.layout.text import counted

if TYPE_CHECKING:
    from disagg.store.upkeep.inventory import Amount, Held, Inventory

_Html = Annotated[
    Path | None,
    typer.Option(
        help="Draw it to a page, with the trees of prefixes: reads the head of one object a chunk."
    ),
]


def ls(url: Url, as_json: AsJson = False, html: _Html = None) -> None:
    """List what a store holds: by namespace, by geometry, by kind of object.

    A namespace is what may share state: one model, one way to store numbers. A geometry is what the
    ranks of one engine write: its number in the catalogue, its ranks. Kinds: full (state that every
    position keeps), window, state (once a request, where a chunk was its end).

    Names and sizes are listed and catalogues read; of objects nothing, but for --html. In folders
    the time is when an object was last read or written, elsewhere when it was written.

    Exit status 1 if the store does not answer.

    JSON: url; namespaces (namespace; text: what all in it have in common, or null; chunk_tokens,
    chunks, objects, bytes, oldest, newest in seconds since 1970; geometries: number, geometry,
    ranks, conventions, kinds (kind, objects, bytes, oldest, newest), number and ranks null where
    the catalogue has none; refused: number, reason); foreign (objects, bytes, names: some).

    \b
    Examples:
      kvpool store ls file:///cache
      kvpool store ls s3://bucket/cache --html cache.html
    """
    from disagg.store.upkeep.inventory import taken
    from disagg.store.upkeep.tree import chunks_of, read_forest

    check_output("--html", html)
    with opened(url) as floor:
        entries = list(floor.list("")) if html is not None else floor.list("")
        inventory = taken(floor, entries)
        if html is not None:
            chunks = chunks_of(entries)
            with bar(len(chunks)) as tell:
                forest = read_forest(floor, chunks, tell)
    if as_json:
        typer.echo(json.dumps({"url": url, **as_dict(inventory)}))
    else:
        _print(url, inventory)
    if html is not None:
        from disagg.cli.store.picture import page

        write_output("--html", html, page(url, inventory, forest))


def as_dict(inventory: Inventory) -> dict[str, Any]:
    """What `ls` prints with --json; its help says what the keys mean."""
    foreign = inventory.foreign
    return {
        "namespaces": [namespace_dict(namespace) for namespace in inventory.namespaces.values()],
        "foreign": {
            "objects": foreign.objects,
            "bytes": foreign.nbytes,
            "names": inventory.foreign_names,
        },
    }


def namespace_dict(namespace: Held) -> dict[str, Any]:
    """A namespace as JSON."""
    geometries = []
    for digest in namespace.digests():
        geometry = namespace.geometry(digest)
        kinds = [
            {"kind": kind, **_amount(amount)}
            for (of, kind), amount in namespace.amounts.items()
            if of == digest
        ]
        geometries.append(
            {
                "number": namespace.number(digest),
                "geometry": digest.hex(),
                "ranks": geometry and len(geometry.parts),
                "conventions": dict(geometry.conventions) if geometry else None,
                "kinds": kinds,
            }
        )
    return {
        "namespace": namespace.namespace,
        "text": namespace.text,
        "chunk_tokens": namespace.chunk_tokens,
        "chunks": len(namespace.keys),
        **_amount(namespace.amount()),
        "geometries": geometries,
        "refused": [{"number": n, "reason": why} for n, why in namespace.refused.items()],
    }


def _amount(amount: Amount) -> dict[str, Any]:
    times = {"oldest": amount.oldest, "newest": amount.newest}
    return {"objects": amount.objects, "bytes": amount.nbytes, **times}


def _print(url: str, inventory: Inventory) -> None:
    from rich.console import Console
    from rich.markup import escape

    from kvpool.layout.text import one_line
    from kvpool.layout.units import human
    from kvpool.render.table import FittedTable

    total = inventory.amount()
    namespaces = counted(len(inventory.namespaces), "namespace")
    typer.echo(f"{url}: {namespaces}, {counted(total.objects, 'object')}, {human(total.nbytes)}")
    table = FittedTable("namespace", "model")
    for name in ("chunks", "geometry"):
        table.add_column(name, justify="right")
    table.add_column("kind")
    for name in ("objects", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"last {used_word(url)}")
    for namespace in inventory.namespaces.values():
        first = namespace.namespace[:12], escape(model_words(namespace)), f"{len(namespace.keys):,}"
        for (digest, kind), amount in sorted(
            namespace.amounts.items(), key=lambda row: _order(namespace, row[0])
        ):
            number = namespace.number(digest)
            geometry = "unknown" if number is None else str(number)
            amounts = f"{amount.objects:,}", human(amount.nbytes), when(amount.newest)
            table.add_row(*first, geometry, kind, *amounts)
            first = "", "", ""
        if first[0]:
            table.add_row(*first, "", "", "0", "0 B", "-")
        table.add_section()
    if inventory.namespaces:
        Console().print(table, crop=False)
    for namespace in inventory.namespaces.values():
        for number, why in namespace.refused.items():
            name = f"{namespace.namespace[:12]} geometry {number}"
            typer.echo(f"{name} cannot be read: {one_line(why, 500)}", err=True)
    if inventory.foreign.objects:
        names = ", ".join(inventory.foreign_names)
        many = counted(inventory.foreign.objects, "object")
        typer.echo(f"foreign: {many}, {human(inventory.foreign.nbytes)}, such as {names}")


def _order(namespace: Held, place: tuple[bytes, str]) -> tuple[int, int]:
    from disagg.store.chunks import KINDS

    return namespace.digests().index(place[0]), KINDS.index(place[1])
