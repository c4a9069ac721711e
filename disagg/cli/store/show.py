"""`kvpool store show`: a namespace, a geometry or an object of a store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.store.common import AsJson, Url, full_namespace, opened
from kvpool.cli.output import fail
from kvpool.layout.text import counted

if TYPE_CHECKING:
    from disagg.store.floors.base import Floor
    from disagg.store.geometry import Geometry
    from disagg.store.objects import Start
    from disagg.store.upkeep.inventory import Held, StoredName

_WHAT = (
    "A namespace, or its first digits; NAMESPACE/geometry/NUMBER; or an object's whole name, as "
    "other commands print it."
)


def show(
    url: Url,
    what: Annotated[str, typer.Argument(metavar="NAMESPACE|NAME", help=_WHAT)],
    as_json: AsJson = False,
) -> None:
    """Show a namespace, a geometry or an object of a store.

    Of a namespace: what all in it have in common, which its name is the digest of, and its
    geometries with their conventions and the objects that a chunk has. Of a geometry: the layouts
    of its objects. Of an object: what its head says, and its layout. Nothing of the data is read:
    kvpool store check does that.

    Exit status 1 if the store does not answer, or what is named is not there or cannot be read.

    JSON: of a namespace as of kvpool store ls; of a geometry namespace, number, geometry (digest),
    chunk_tokens, conventions, parts (of each rank, by kind: bytes, blocks, layout); of an object
    name, kind, chunk, first_token, tokens, key, parent (null for the first chunk), geometry,
    number, part, bytes, blocks, layout.

    \b
    Examples:
      kvpool store show file:///cache 3f2a91
      kvpool store show file:///cache 3f2a91/geometry/0 --json
    """
    from disagg.store.upkeep.inventory import object_name

    with opened(url) as floor:
        try:
            name = object_name(what)
            if name is not None:
                _object(floor, what, name, as_json)
            else:
                _namespace_or_geometry(floor, what, as_json)
        except ValueError as error:
            fail(f"{what}: {error}")


def find(floor: Floor, what: str) -> tuple[Held, int | None]:
    """The namespace that `NAMESPACE`, `NAMESPACE/NUMBER` or `NAMESPACE/geometry/NUMBER` names, with
    its catalogue, and the number. Raises typer.BadParameter.
    """
    from disagg.store.upkeep.inventory import take

    name, *rest = what.split("/")
    number = rest[-1] if rest else ""
    if not name.isascii() or not name.isalnum() or rest[:-1] not in ([], ["geometry"]):
        raise typer.BadParameter(f"{what}: {_WHAT}")
    if rest and not (number.isascii() and number.isdigit() and len(number) < 3):
        raise typer.BadParameter(f"{what}: a geometry has a number from 0 to 63, got {number!r}.")
    inventory = take(floor, name if len(name) == 32 else "")
    namespace = inventory.namespaces[full_namespace(inventory, name)]
    if not rest:
        return namespace, None
    if int(number) in namespace.refused:
        raise ValueError(f"it cannot be read: {namespace.refused[int(number)]}")
    if int(number) not in namespace.geometries:
        numbers = ", ".join(map(str, namespace.geometries)) or "none"
        raise typer.BadParameter(f"{what}: the catalogue has {numbers}.")
    return namespace, int(number)


def _namespace_or_geometry(floor: Floor, what: str, as_json: bool) -> None:
    from disagg.cli.store.ls import namespace_dict

    namespace, number = find(floor, what)
    if number is not None:
        geometry = namespace.geometries[number]
        if as_json:
            typer.echo(json.dumps(_geometry_dict(namespace, number, geometry)))
        else:
            _print_geometry(namespace, number, geometry)
    elif as_json:
        typer.echo(json.dumps(namespace_dict(namespace)))
    else:
        _print_namespace(namespace)


def _geometry_dict(namespace: Held, number: int, geometry: Geometry) -> dict[str, Any]:
    parts = [
        {
            kind: {
                "bytes": chunk.nbytes,
                "blocks": len(chunk.blocks) - 1,
                "layout": json.loads(chunk.layout.to_json()),
            }
            for kind, chunk in part.items()
        }
        for part in geometry.parts
    ]
    return {
        "namespace": namespace.namespace,
        "number": number,
        "geometry": geometry.digest.hex(),
        "chunk_tokens": geometry.chunk_tokens,
        "conventions": dict(geometry.conventions),
        "parts": parts,
    }


def _print_namespace(namespace: Held) -> None:
    from rich.console import Console
    from rich.markup import escape

    from disagg.store.upkeep.compare import form_words
    from kvpool.layout.text import one_line
    from kvpool.layout.units import human
    from kvpool.render.table import FittedTable

    amount = namespace.amount()
    chunks, objects = counted(len(namespace.keys), "chunk"), counted(amount.objects, "object")
    typer.echo(f"namespace {namespace.namespace}: {chunks}, {objects}, {human(amount.nbytes)}")
    text = namespace.text or {}
    for name, value in text.items():
        if name != "state":
            typer.echo(f"  {name}: {'not said' if value is None else value}")
    for role, forms in text.get("state", {}).items():
        typer.echo(f"  state {role}: {form_words(forms)} a layer")
    table = FittedTable("geometry", "kind")
    for name in ("ranks", "bytes a chunk", "objects"):
        table.add_column(name, justify="right")
    table.add_column("conventions beside the namespace's")
    for digest in namespace.digests():
        geometry, number = namespace.geometry(digest), namespace.number(digest)
        named = digest.hex()[:16] if number is None else f"{number}: {digest.hex()[:16]}"
        conventions = dict(geometry.conventions) if geometry else {}
        words = ", ".join(f"{k}={v}" for k, v in conventions.items() if k not in text) or "-"
        for kind in sorted({what for of, what in namespace.amounts if of == digest}):
            parts = [part[kind] for part in geometry.parts if kind in part] if geometry else []
            sizes = human(sum(part.nbytes for part in parts)) if parts else "unknown"
            count = f"{namespace.amount(digest, kind).objects:,}"
            table.add_row(named, kind, str(len(parts) or "-"), sizes, count, escape(words))
            named = words = ""
    Console().print(table, crop=False)
    for number, why in namespace.refused.items():
        typer.echo(f"geometry {number} cannot be read: {one_line(why, 500)}", err=True)


def _print_geometry(namespace: Held, number: int, geometry: Geometry) -> None:
    from rich.console import Console

    from kvpool.layout.units import human
    from kvpool.render.text import layout_table

    ranks = counted(len(geometry.parts), "rank")
    typer.echo(
        f"namespace {namespace.namespace}, geometry {number}: {geometry.digest.hex()}, {ranks}, "
        f"chunks of {geometry.chunk_tokens:,} tokens"
    )
    for name, value in geometry.conventions.items():
        typer.echo(f"  {name}: {value}")
    for rank, part in enumerate(geometry.parts):
        for kind, chunk in part.items():
            blocks = counted(len(chunk.blocks) - 1, "block")
            title = f"part {rank}, {kind}: {human(chunk.nbytes)} a chunk in {blocks}"
            Console().print(layout_table(chunk.layout, title), "", crop=False)


def _object(floor: Floor, name: str, stored: StoredName, as_json: bool) -> None:
    """Raises ValueError for what cannot be read."""
    from disagg.store.objects import START_BYTES, Damaged, decode_start
    from disagg.store.upkeep.inventory import take

    with floor.read(name, [(0, START_BYTES)]) as (data,):
        start = decode_start(data)
    if start.identity.name(stored.namespace) != name:
        raise Damaged(f"its head is of {start.identity.name(stored.namespace)}.")
    namespace = take(floor, stored.namespace).namespaces[stored.namespace]
    geometry, number = namespace.geometry(stored.geometry), namespace.number(stored.geometry)
    if geometry is None:
        raise ValueError(f"the catalogue has no geometry {stored.geometry.hex()[:16]}.")
    if stored.part >= len(geometry.parts) or stored.kind not in geometry.parts[stored.part]:
        raise ValueError(f"geometry {number} has no part {stored.part} of kind {stored.kind}.")
    fields = _object_dict(name, start, geometry)
    if as_json:
        layout = json.loads(geometry.parts[stored.part][stored.kind].layout.to_json())
        typer.echo(json.dumps({**fields, "number": number, "layout": layout}))
    else:
        _print_object(fields, number, geometry)


def _object_dict(name: str, start: Start, geometry: Geometry) -> dict[str, Any]:
    identity = start.identity
    return {
        "name": name,
        "kind": identity.kind,
        "chunk": identity.chunk,
        "first_token": identity.chunk * geometry.chunk_tokens,
        "tokens": geometry.chunk_tokens,
        "key": identity.key.hex(),
        "parent": start.parent.hex() if identity.chunk else None,
        "geometry": identity.geometry.hex(),
        "part": identity.part,
        "bytes": start.nbytes,
        "blocks": len(geometry.parts[identity.part][identity.kind].blocks) - 1,
    }


def _print_object(fields: dict[str, Any], number: int | None, geometry: Geometry) -> None:
    from rich.console import Console

    from kvpool.render.text import layout_table

    first, count = fields["first_token"], fields["tokens"]
    typer.echo(f"{fields['name']}: {fields['kind']} of tokens {first:,} to {first + count - 1:,}")
    typer.echo(f"  chunk {fields['chunk']:,}, key {fields['key']}")
    typer.echo(f"  follows {fields['parent'] or 'nothing: it is the first'}")
    part = f"part {fields['part']} of {len(geometry.parts)}"
    typer.echo(
        f"  geometry {number}, {part}, {fields['bytes']:,} bytes in {fields['blocks']} blocks"
    )
    layout = geometry.parts[fields["part"]][fields["kind"]].layout
    Console().print(layout_table(layout, "as it lies behind the head"), crop=False)
