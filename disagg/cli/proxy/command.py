"""`kvpool proxy`: one address in front of prefill and decode servers."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

_URL = "A {} server of vLLM or SGLang; several take turns."
_ORDER = "When a vLLM decode is asked: together with its vLLM prefill, or once that has answered."


def proxy(
    prefill: Annotated[list[str], typer.Option(metavar="URL", help=_URL.format("prefill"))],
    decode: Annotated[list[str], typer.Option(metavar="URL", help=_URL.format("decode"))],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    at_once: Annotated[bool, typer.Option("--at-once/--after-prefill", help=_ORDER)] = False,
) -> None:
    """Hand requests to prefill and decode servers, for trying; a router is for production.

    Takes OpenAI's completions and chats, streamed or not, and passes on what decode answers, errors
    of both sides, and a client's leaving. Which engine a server has, it finds out: vLLM's and
    SGLang's may be mixed. Servers take turns; none is left out because it fails.

    Each answer's header Server-Timing has milliseconds until its first byte: prefill's, decode's
    and in total. There are no keys: any client of the port reaches the servers.

    \b
    Example:
      kvpool proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
    """
    from kvpool.extras import needed_by

    for url in (*prefill, *decode):
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url}: http://HOST:PORT of a server.")
    with needed_by("kvpool proxy"):
        from aiohttp import web

        from disagg.cli.proxy.app import proxy_app

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        typer.echo(f"{host}:{port} cannot be used: {error.strerror or error}.", err=True)
        raise typer.Exit(1) from None
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{listener.getsockname()[1]}")
    # without cancellation a client that leaves would go unnoticed until bytes are written
    app = proxy_app(prefill, decode, at_once=at_once)
    web.run_app(app, sock=listener, handler_cancellation=True, access_log=None, print=None)
