"""`kvpool explain`: how bytes travel between layout files, or the ranks of model configs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import check_output, write_output
from kvpool.cli.budget import model_names

if TYPE_CHECKING:
    from disagg.contract.hand_off import HandOff

BOTH = "one value, or PREFILL:DECODE."
_WHAT = (
    "Prefill's layout files or model configs, then decode's one; "
    "or one model config for both sides."
)
_What = Annotated[list[str], typer.Argument(help=_WHAT, autocompletion=model_names)]
_Tp = Annotated[str | None, typer.Option(help=f"Shards of each layer: {BOTH} Default: 1.")]
_Pp = Annotated[str | None, typer.Option(help=f"Pipeline stages: {BOTH} Default: 1.")]
_PageSize = Annotated[str | None, typer.Option(help=f"Tokens a page: {BOTH} Default: the model's.")]
_Packing = Annotated[
    str | None,
    typer.Option("--packing", "--dtype", help=f"How entries are stored: {BOTH} Default: bf16."),
]
_Draft = Annotated[
    bool, typer.Option("--draft", help="The draft (MTP) layers of models too, on both sides.")
]
_Tokens = Annotated[int, typer.Option(min=1, max=1 << 24, help="Length of the request.")]
_Link = Annotated[
    str | None, typer.Option(help="Time on the wire, if each rank has such a link: 400Gb, 50GB.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Html = Annotated[
    Path | None,
    typer.Option(help="Draw the items of both sides to a page; what travels is in colour."),
]


def explain(
    what: _What,
    tp: _Tp = None,
    pp: _Pp = None,
    page_size: _PageSize = None,
    packing: _Packing = None,
    draft: _Draft = False,
    tokens: _Tokens = 2048,
    link: _Link = None,
    as_json: _AsJson = False,
    html: _Html = None,
) -> None:
    """Explain how bytes would travel between two layouts.

    Layouts are files of PoolLayout.to_json or to_msgpack, or those of the ranks of a model: a
    config.json, a directory that holds one, or the name of a shipped config. How a model is split
    and stored is said for both sides (--tp 8) or for each (--tp 8:4; --tp 8: leaves decode its
    default). Its ranks are numbered stage by stage; the last stage has the draft's layers. Decode
    ranks that are filled alike are explained once.

    Exit status 1 if decode cannot be filled: all reasons are listed, with the files or ranks that
    each is about.

    JSON: tokens; prefill and decode (the ranks: of, number); plans (decode ranks, rows of owner,
    roles, layers, how, why, runs and bytes, and all runs and bytes of one rank); sent (bytes of
    each prefill rank); bytes_per_second of the link and seconds on the wire, or null; refused
    (prefill, decode, reason).

    \b
    Examples:
      kvpool explain prefill0.json prefill1.json decode.json
      kvpool explain llama_3_1_70b --tp 8:4 --link 400Gb --html plan.html
    """
    from disagg.cli.sides import parse_link, parse_sides
    from disagg.contract.hand_off import HandOff

    check_output("--html", html)
    try:
        rate = None if link is None else parse_link(link)
        wholes = {"tp": tp, "pp": pp, "page_size": page_size}
        prefill, decode = parse_sides(what, wholes, packing, draft)
        hand_off = HandOff(prefill, decode, tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    refusals = hand_off.refusals()
    if as_json:
        typer.echo(json.dumps(as_dict(hand_off, rate)))
    elif refusals:
        for sources, dests, line in refusals:
            typer.echo(f"refused: {sources} -> {dests}: {line}")
    else:
        print_plans(hand_off, rate)
    if refusals:
        raise typer.Exit(1)
    if html is not None:
        from disagg.cli.picture import page

        write_output("--html", html, page(hand_off))


def print_plans(hand_off: HandOff, rate: float | None) -> None:
    """Tables of what travels to each decode rank, and how long that takes on the wire."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for numbers, explanation in hand_off.explained:
        table = explanation.table()
        if len(hand_off.decode.ranks) > 1:
            alike = ", each" if len(numbers) > 1 else ""
            table.title = f"{escape(hand_off.decode.words(numbers))}{alike}: {table.title}"
        console.print(table, "", crop=False)
    if rate is not None:
        console.print(_on_the_wire(hand_off, rate), markup=False, highlight=False)


def _on_the_wire(hand_off: HandOff, rate: float) -> str:
    """How long the busiest rank's link takes, without any overhead."""
    words, longest = [], 0.0
    for side, did, moved in (
        (hand_off.decode, "received by", hand_off.received()),
        (hand_off.prefill, "sent by", hand_off.sent()),
    ):
        most = max(moved, key=lambda number: moved[number])
        words.append(f"{moved[most]:,} bytes are {did} {side.words([most])}")
        longest = max(longest, moved[most] / rate)
    took = f"{1e3 * longest:,.4g} ms at {8e-9 * rate:,g} Gb/s a rank"
    return f"on the wire: {took}; at most {words[0]}, {words[1]}."


def as_dict(hand_off: HandOff, rate: float | None) -> dict[str, Any]:
    """The JSON of a hand-off, refused or not."""
    plans = []
    for numbers, explanation in hand_off.explained:
        rows = [asdict(row) for row in explanation.rows]
        for row in rows:
            row["bytes"] = row.pop("nbytes")
        counts = {"runs": explanation.runs, "bytes": explanation.nbytes}
        plans.append({"decode": numbers, "rows": rows, **counts})
    sent, received, refusals = hand_off.sent(), hand_off.received(), hand_off.refusals()
    most = max((*sent.values(), *received.values()), default=0)
    sides = {
        side.name: [{"of": rank.of, "number": rank.number} for rank in side.ranks]
        for side in (hand_off.prefill, hand_off.decode)
    }
    return {
        "tokens": hand_off.tokens,
        **sides,
        "plans": plans,
        "sent": [*sent.values()],
        "bytes_per_second": rate,
        "seconds": None if rate is None or refusals else most / rate,
        "refused": [dict(zip(("prefill", "decode", "reason"), refusal)) for refusal in refusals],
    }
