"""`kvpool check`: whether two engines can work together over the network that is between them."""

from __future__ import annotations

from typing import Annotated

import typer

CHECK_SECONDS, SERVE_SECONDS = 30.0, 600.0
_SOURCE = "file, or http://HOST:PORT of its port; of an engine's ranks several, with commas."
_Prefill = Annotated[str, typer.Argument(help=f"Prefill's contract: a {_SOURCE}")]
_Decode = Annotated[str | None, typer.Argument(help=f"Decode's contract: a {_SOURCE}")]
_Serve = Annotated[
    str | None,
    typer.Option(help="On prefill's host: offer bytes at tcp://HOST:PORT and the ports behind."),
]
_From = Annotated[
    str | None, typer.Option("--from", help="On decode's host: where `--serve` offers them.")
]
_Settings = Annotated[
    str, typer.Option(help="The server's on this host, JSON or a file: engine_options, keys, ...")
]
_Bytes = Annotated[str, typer.Option("--bytes", help="How much to move.")]
_Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help=f"Seconds, at most, of a handshake and of moving (default: {CHECK_SECONDS:g}), or of "
        f"--serve (default: {SERVE_SECONDS:g}).",
    ),
]
_Device = Annotated[
    str | None, typer.Option(help="Of the check's memory (default: the engine's): cpu, cuda:0.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def check(
    prefill: _Prefill,
    decode: _Decode = None,
    serve: _Serve = None,
    source: _From = None,
    settings: _Settings = "{}",
    nbytes: _Bytes = "1GiB",
    timeout: _Timeout = None,
    device: _Device = None,
    as_json: _AsJson = False,
) -> None:
    """Say whether two engines can work together over their network, and how fast.

    All reasons against are told. Contracts are compared as `kvpool pair` does, running ranks of
    prefill are dialled and left again, and bytes are moved and compared by checksum. They come from
    `kvpool check --serve` on prefill's host, which has memory of its own, laid out as the engine's:
    no page of an engine is read or written. On this host it is started by itself; on another, start
    it there and name it by --from. Give both the settings that the server on their host has.

    Exit status 1 if there is a reason against, or nothing can be served.

    JSON: check, true or false; prefill and decode, as `kvpool pair` prints them; refused (about,
    prefill, decode, reason); handshake (addresses that answered); moved (bytes, seconds,
    gib_per_second, rooms, tokens, complete) and transport (engine, bytes, messages, lanes
    of UCX), or null; unchecked (sentences). Of --serve: serves (addresses), engine, tokens.

    \b
    Examples:
      kvpool check http://127.0.0.1:9400 http://127.0.0.1:9401
      kvpool check http://127.0.0.1:9400 --serve tcp://10.0.0.1:29199 --settings settings.json
      kvpool check http://10.0.0.1:9400 http://10.0.0.2:9400 --from tcp://10.0.0.1:29199
    """
    from disagg.cli.check.sides import Terms, compare, offer
    from kvpool.layout.units import parse_memory

    if (decode is None) == (serve is None) or (serve is not None and source is not None):
        raise typer.BadParameter("give DECODE, or --serve on prefill's host.")
    try:
        terms = Terms(
            settings=settings,
            nbytes=parse_memory(nbytes, "--bytes"),
            timeout=timeout or (CHECK_SECONDS if serve is None else SERVE_SECONDS),
            device=device,
            as_json=as_json,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if serve is not None:
        offer(prefill, serve, terms)
    elif decode is not None:
        compare(prefill, decode, source, terms)
