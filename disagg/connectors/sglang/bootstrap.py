"""`python -m disagg.connectors.sglang.bootstrap ADDRESS...`: a prefill of another engine, for
SGLang's decodes.

SGLang's decode asks the HTTP server at `bootstrap_host` and `bootstrap_port` where prefill's ranks
are. SGLang's prefill brings such a server; this one names the endpoints of an engine that has none.
It needs no SGLang.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

UNKNOWN = "-1"
"""Asked for in place of a rank: how many ranks there are."""


class BootstrapServer(ThreadingHTTPServer):
    """Serves `GET /route` of SGLang 0.5.22 and 0.5.23 for ranks at `addresses`, which are taken for
    ranks of tensor parallelism. `page_size` and `kv_cache_dtype` are named to SGLang, which our
    connector does not compare.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, addresses: Sequence[str]) -> None:
        super().__init__((host, port), _Handler)
        self.ranks = [dict(zip(("rank_ip", "rank_port"), split(each))) for each in addresses]

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self.server_address[1])

    def answer(self, query: dict[str, list[str]]) -> dict[str, Any] | None:
        """All of prefill, or the rank that is asked for; None for one that is not there."""
        rank = query.get("target_tp_rank", [UNKNOWN])[0]
        if rank == UNKNOWN:
            return {
                "attn_tp_size": len(self.ranks),
                **dict.fromkeys(("attn_cp_size", "dp_size", "pp_size"), 1),
                **dict.fromkeys(("page_size", "kv_cache_dtype")),
                "follow_bootstrap_room": True,
            }
        known = rank.isdecimal() and int(rank) < len(self.ranks)
        return self.ranks[int(rank)] if known else None


class _Handler(BaseHTTPRequestHandler):
    server: BootstrapServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        found = self.server.answer(parse_qs(url.query)) if url.path == "/route" else None
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not a line for each request."""


def split(address: str) -> tuple[str, int]:
    """An endpoint address as bootstrap carries it: a unix socket has port 0."""
    if not address.startswith("tcp://"):
        return address, 0
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """The endpoint address that `split` took apart."""
    if not port:
        return host
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+", help="endpoint addresses of prefill's ranks")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8998)
    given = parser.parse_args()
    with BootstrapServer(given.host, given.port, given.addresses) as server:
        print(f"{len(server.ranks)} ranks at http://{given.host}:{server.port}/route")
        server.serve_forever()


if __name__ == "__main__":
    main()
