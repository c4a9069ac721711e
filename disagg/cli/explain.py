"""`kvpool explain`: how bytes travel between layout files, or the ranks of model configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import check_output, write_output
from kvpool.cli.budget import model_names

if TYPE_CHECKING:
    from disagg.cli.compare import Alternatives
    from disagg.cli.wire import LinkRates
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
_Order = Annotated[
    str | None, typer.Option(help=f"Axes of a page of K and V, nhd or hnd: {BOTH} Default: nhd.")
]
_Placement = Annotated[
    str | None,
    typer.Option(help=f"Of the layers: layer, page, stack or block: {BOTH} Default: layer."),
]
_Draft = Annotated[
    bool, typer.Option("--draft", help="The draft (MTP) layers of models too, on both sides.")
]
_Tokens = Annotated[int, typer.Option(min=1, max=1 << 24, help="Length of the request.")]
_Link = Annotated[
    str | None, typer.Option(help="Time on the wire, if each rank has such a link: 400Gb, 50GB.")
]
_RunRate = Annotated[
    str | None, typer.Option(help="Time of the runs, if a link does so many a second: 5M, 200k.")
]
_Compare = Annotated[
    bool, typer.Option("--compare", help="Which order, page size or placement makes runs long.")
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
    order: _Order = None,
    placement: _Placement = None,
    draft: _Draft = False,
    tokens: _Tokens = 2048,
    link: _Link = None,
    run_rate: _RunRate = None,
    compare: _Compare = False,
    as_json: _AsJson = False,
    html: _Html = None,
) -> None:
    """Explain how bytes would travel between two layouts.

    Layouts are files of PoolLayout.to_json or to_msgpack, or those of the ranks of a model: a
    config.json, a directory that holds one, or the name of a shipped config. How a model is split
    and stored is said for both sides (--tp 8) or for each (--tp 8:4; --tp 8: leaves decode its
    default). Its ranks are numbered stage by stage; the last stage has the draft's layers. Decode
    ranks that are filled alike are explained once.

    The time on the wire is a lower bound: that of the bytes, without any overhead. A link may do
    fewer runs a second than it supposes. --compare changes the order, the page size or the
    placement of either side or both, one thing at a time.

    Exit status 1 if decode cannot be filled: all reasons are listed, each with files or ranks.

    JSON: tokens; prefill and decode (the ranks: of, number); plans (decode ranks, rows of owner,
    roles, layers, how, why, runs and bytes, and all runs and bytes of one rank); sent (bytes of
    each prefill rank); bytes_per_second of the link, seconds that the bytes take at least and
    supposed_runs_per_second in them; runs_per_second of --run-rate, and run_seconds at it; compared
    (null without --compare; the best first: options, runs, bytes_per_run and median of the rank
    with most runs, most bytes of a rank, seconds, run_seconds, refused: null or why); refused
    (prefill, decode, reason). What is not asked is null.

    \b
    Examples:
      kvpool explain prefill0.json prefill1.json decode.json
      kvpool explain llama_3_1_70b --tp 8:4 --link 400Gb --html plan.html
      kvpool explain llama_3_1_70b --tp 8:4 --page-size 64:16 --compare
    """
    check_output("--html", html)
    options = {"tp": tp, "pp": pp, "page_size": page_size, "packing": packing}
    options |= {"order": order, "placement": placement}
    rates = _rates(link, run_rate)
    hand_off, alternatives = _read(what, options, draft, tokens, rates=rates, compare=compare)
    if as_json:
        compared = {"compared": alternatives and alternatives.as_dicts()}
        typer.echo(json.dumps(as_dict(hand_off, rates) | compared))
    else:
        print_outcome(hand_off, rates, alternatives)
    if hand_off.refusals():
        raise typer.Exit(1)
    if html is not None:
        from disagg.cli.picture import page

        write_output("--html", html, page(hand_off, rates, alternatives))


def _rates(link: str | None, run_rate: str | None) -> LinkRates:
    """What a link does, of the options. Raises typer.BadParameter."""
    from disagg.cli.sides import parse_link, parse_run_rate
    from disagg.cli.wire import LinkRates

    try:
        return LinkRates(
            None if link is None else parse_link(link),
            None if run_rate is None else parse_run_rate(run_rate),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _read(
    what: Sequence[str],
    options: dict[str, str | None],
    draft: bool,
    tokens: int,
    *,
    rates: LinkRates,
    compare: bool,
) -> tuple[HandOff, Alternatives | None]:
    """What travels, and what the alternatives would change. Raises typer.BadParameter."""
    from disagg.cli.compare import Alternatives
    from disagg.cli.sides import parse_sides, read_sides
    from disagg.contract.hand_off import HandOff

    try:
        prefill, decode = parse_sides(what, options, draft)
        ranks = read_sides(prefill, decode)
        hand_off = HandOff(prefill=ranks[0], decode=ranks[1], tokens=tokens)
        return hand_off, Alternatives.of(prefill, decode, tokens, rates) if compare else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def print_outcome(hand_off: HandOff, link: LinkRates, alternatives: Alternatives | None) -> None:
    """What travels or why nothing does, and what the alternatives would change."""
    from rich.console import Console

    refusals = hand_off.refusals()
    for sources, dests, line in refusals:
        typer.echo(f"refused: {sources} -> {dests}: {line}")
    if not refusals:
        print_plans(hand_off, link)
    if alternatives is not None:
        console = Console()
        console.print("", alternatives.table(), crop=False)
        for words in alternatives.words():
            console.print(words, markup=False, highlight=False)


def print_plans(hand_off: HandOff, link: LinkRates) -> None:
    """Tables of what travels to each decode rank, and how long that takes on the wire."""
    from rich.console import Console
    from rich.markup import escape

    from disagg.cli.wire import wire_words

    console = Console()
    for numbers, explanation in hand_off.explained:
        table = explanation.table()
        if len(hand_off.decode.ranks) > 1:
            alike = ", each" if len(numbers) > 1 else ""
            table.title = f"{escape(hand_off.decode.words(numbers))}{alike}: {table.title}"
        console.print(table, "", crop=False)
    for words in wire_words(hand_off, link):
        console.print(words, markup=False, highlight=False)


def as_dict(hand_off: HandOff, link: LinkRates) -> dict[str, Any]:
    """The JSON of a hand-off, refused or not."""
    from disagg.cli.wire import Busiest

    plans = []
    for numbers, explanation in hand_off.explained:
        rows = [asdict(row) for row in explanation.rows]
        for row in rows:
            row["bytes"] = row.pop("nbytes")
        counts = {"runs": explanation.runs, "bytes": explanation.nbytes}
        plans.append({"decode": numbers, "rows": rows, **counts})
    busiest, refusals = Busiest.of(hand_off), hand_off.refusals()
    sides = {
        side.name: [{"of": rank.of, "number": rank.number} for rank in side.ranks]
        for side in (hand_off.prefill, hand_off.decode)
    }
    return {
        "tokens": hand_off.tokens,
        **sides,
        "plans": plans,
        "sent": [*hand_off.sent().values()],
        "bytes_per_second": link.bytes_per_second,
        "seconds": None if refusals else link.byte_seconds(busiest.nbytes),
        "supposed_runs_per_second": None if refusals else busiest.supposed_rate(link),
        "runs_per_second": link.runs_per_second,
        "run_seconds": None if refusals else link.run_seconds(busiest.traffic.runs),
        "refused": [dict(zip(("prefill", "decode", "reason"), refusal)) for refusal in refusals],
    }
