"""`kvpool store explain`: why two configurations share state, or do not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.store.common import AsJson, opened
from kvpool.cli.budget import model_names
from kvpool.layout.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.cli.sides import RankSplit
    from disagg.protocol.messages import Convention
    from disagg.store.upkeep.compare import ComparedRow, Configuration, StoreComparison

CHUNK_TOKENS = 256
_STORED = re.compile(
    r"(?P<url>[a-z0-9]+://[^?]*?)/(?P<what>[0-9a-f]{4,32}(?:/(?:geometry/)?[0-9]{1,2})?)/?"
    r"(?P<options>\?.*)?"
)
"""A store's URL with a namespace, and perhaps the number of a geometry, at the end of its path."""
_CONFIGURATION = (
    "Layout files of an engine's ranks, joined by commas; a model's config.json, a directory that "
    "has one, or the name of a shipped config; or URL/NAMESPACE, URL/NAMESPACE/NUMBER."
)
BOTH = "of models: one value, or A:B."
_A = Annotated[str, typer.Argument(metavar="A", help=_CONFIGURATION, autocompletion=model_names)]
_B = Annotated[str, typer.Argument(metavar="B", help="The same.", autocompletion=model_names)]
_Tp = Annotated[str | None, typer.Option(help=f"Shards of each layer, {BOTH} Default: 1.")]
_Pp = Annotated[str | None, typer.Option(help=f"Pipeline stages, {BOTH} Default: 1.")]
_PageSize = Annotated[str | None, typer.Option(help=f"Tokens a page, {BOTH} Default: the model's.")]
_Packing = Annotated[
    str | None,
    typer.Option("--packing", "--dtype", help=f"How entries are stored, {BOTH} Default: bf16."),
]
_Draft = Annotated[bool, typer.Option("--draft", help="The draft (MTP) layers of models too.")]
_ChunkTokens = Annotated[
    int | None,
    typer.Option(min=1, max=1 << 20, help="Tokens a chunk. Default: a store's, if any; else 256."),
]


def explain(
    first: _A,
    second: _B,
    tp: _Tp = None,
    pp: _Pp = None,
    page_size: _PageSize = None,
    packing: _Packing = None,
    draft: _Draft = False,
    chunk_tokens: _ChunkTokens = None,
    as_json: AsJson = False,
) -> None:
    """Explain why two configurations share state through a store, or do not.

    Two engines share where their namespaces are the same (model, weights, how numbers are stored,
    tokens a chunk), no convention differs that both say, and a plan leads from what one writes to
    the other's pool. TP, PP, page sizes and placement may differ. This compares all three, both
    ways, and says which objects a prefix needs.

    Layout files have no conventions, and a config.json not all: those that are missing may still
    keep two engines apart. In a store each geometry has its writer's. URL/NAMESPACE takes the
    first geometry.

    Exit status 1 if they do not share both ways.

    JSON: a and b (name, namespace, chunk_tokens, needs); namespace and conventions (name, first,
    second, same: same, different or not said); a_to_b and b_to_a (shares, reasons, converts:
    whether it is read with cast).

    \b
    Examples:
      kvpool store explain llama_3_1_70b llama_3_1_70b --tp 8:4 --packing bf16:fp8
      kvpool store explain file:///cache/3f2a91/0 /models/my-model
    """
    from disagg.cli.sides import parse_splits
    from disagg.store.upkeep.compare import compare

    options = {"tp": tp, "pp": pp, "page_size": page_size, "packing": packing}
    sides: dict[int, Configuration] = {}
    try:
        splits = parse_splits(options, draft, "A:B")
        for number, text in enumerate((first, second)):
            if "://" in text:
                sides[number] = _stored(text)
        stored = [side.geometry.chunk_tokens for side in sides.values()]
        tokens = chunk_tokens or next(iter(stored), CHUNK_TOKENS)
        for number, text in enumerate((first, second)):
            if number not in sides:
                sides[number] = _planned(text, splits[number], tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    comparison = compare(sides[0], sides[1])
    pair = sides[0], sides[1]
    if as_json:
        typer.echo(json.dumps(_as_dict(pair, comparison)))
    else:
        _print(pair, comparison)
    if not (comparison.shares(True) and comparison.shares(False)):
        raise typer.Exit(1)


def _stored(text: str) -> Configuration:
    """Of `URL/NAMESPACE` or `URL/NAMESPACE/NUMBER`. Raises ValueError."""
    from disagg.cli.store.show import find
    from disagg.store.upkeep.compare import of_geometry

    match = _STORED.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text}: give the namespace too, as URL/NAMESPACE or URL/NAMESPACE/NUMBER. kvpool "
            "store ls lists them."
        )
    with opened(match["url"] + (match["options"] or "")) as floor:
        namespace, number = find(floor, match["what"])
    if number is None:
        if not namespace.geometries:
            raise ValueError(f"{text}: its catalogue has no geometry that can be read.")
        number = next(iter(namespace.geometries))
    name = f"{match['url']}/{namespace.namespace[:12]}/{number}"
    return of_geometry(name, namespace.geometries[number])


def _planned(text: str, split: RankSplit, chunk_tokens: int) -> Configuration:
    """Of layout files or a model. Raises ValueError."""
    from disagg.cli.sides import read_side
    from disagg.store.upkeep.compare import of_ranks

    whats = text.split(",") if all(map(isfile, text.split(","))) else [text]
    side = read_side(text, whats, split)
    several = len(side.ranks) > 1
    ranks = [
        (f"rank {number}" if several else "", rank.layout) for number, rank in enumerate(side.ranks)
    ]
    conventions = {} if side.files else _conventions(text)
    words = f"{text}, {len(ranks)} ranks" if several else text
    return of_ranks(words, ranks, conventions, chunk_tokens)


def _conventions(config: str) -> dict[str, Convention]:
    """What a model's config says of its bytes."""
    from disagg.connectors.conventions import conventions
    from kvpool.models.config import read_config

    folder = config if Path(config).is_dir() else None
    return conventions(read_config(config), folder=folder)


def _as_dict(
    sides: tuple[Configuration, Configuration], comparison: StoreComparison
) -> dict[str, Any]:
    from disagg.store.upkeep.compare import needs

    descriptions = [
        {
            "name": side.name,
            "namespace": side.namespace,
            "chunk_tokens": side.geometry.chunk_tokens,
            "needs": needs(side),
        }
        for side in sides
    ]
    ways = (True, comparison.first_to_second), (False, comparison.second_to_first)
    forth, back = (
        {
            "shares": comparison.shares(way),
            "reasons": list(reasons),
            "converts": comparison.converts(way),
        }
        for way, reasons in ways
    )
    return {
        "a": descriptions[0],
        "b": descriptions[1],
        "namespace": [asdict(row) for row in comparison.namespaces],
        "conventions": [asdict(row) for row in comparison.conventions],
        "a_to_b": forth,
        "b_to_a": back,
    }


def _print(sides: tuple[Configuration, Configuration], comparison: StoreComparison) -> None:
    from rich.console import Console

    from disagg.store.upkeep.compare import needs

    console = Console()
    for letter, side in zip("AB", sides):
        proviso = "" if side.complete else ", if it says no more than is known here"
        typer.echo(f"{letter}: {side.name}")
        typer.echo(f"   namespace {side.namespace}{proviso}")
        typer.echo(f"   a prefix needs: {' '.join(needs(side))}")
    typer.echo("")
    for title, rows in (
        ("namespace", comparison.namespaces),
        ("conventions", comparison.conventions),
    ):
        _print_rows(console, title, rows)
    ways = (
        ("what A writes, B can", True, comparison.first_to_second),
        ("what B writes, A can", False, comparison.second_to_first),
    )
    for words, forth, reasons in ways:
        if comparison.shares(forth):
            unsaid = ", ".join(comparison.unsaid)
            condition = f", where they agree on {unsaid}" if unsaid else ""
            typer.echo(f"{words} read{condition}.")
            continue
        typer.echo(f"{words}not read:")
        if not comparison.same_namespace:
            names = [row.name for row in comparison.namespaces if row.same == "different"]
            typer.echo(f"  other namespaces, which differ in {', '.join(names)}.")
        for reason in reasons:
            typer.echo(f"  {reason}")
        if comparison.converts(forth):
            typer.echo("  With cast it is read and converted (docs/cast.md).")
    if comparison.first_to_second or comparison.second_to_first:
        typer.echo("In reasons of plans, prefill is the writer and decode the reader.")


def _print_rows(console: Console, title: str, rows: Sequence[ComparedRow]) -> None:
    """Rows that are not the same on both sides, and how many are."""
    from rich.markup import escape

    from kvpool.render.table import FittedTable

    same = sum(row.same == "same" for row in rows)
    if same == len(rows):
        typer.echo(f"{title}: the same, {counted(same, 'name')}." if rows else f"{title}: none.")
        return
    table = FittedTable(title, "A", "B", "")
    for row in rows:
        if row.same != "same":
            values = (escape(_words(row.name, value)) for value in (row.first, row.second))
            table.add_row(escape(row.name), *values, row.same)
    console.print(table, crop=False)
    typer.echo(f"{title}: {counted(same, 'other')} the same.\n")


def _words(name: str, value: Any) -> str:
    from disagg.store.upkeep.compare import form_words

    if value is None:
        return "-"
    return form_words(value) if name.startswith("state ") else str(value)
