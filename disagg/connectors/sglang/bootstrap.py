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

from disagg.runtime.sockets.address import tcp_text

UNKNOWN = "-1"
"""Asked for in place of a rank: how many ranks there are."""


class BootstrapServer(ThreadingHTTPServer):
    """Serves `GET /route` of SGLang 0.5.22 and 0.5.23 for ranks at `addresses`, which are taken for
    ranks of tensor parallelism. `page_size` and `kv_cache_dtype` are named to SGLang, which our
    connector does not compare.
    """

    def __init__(self, host: str, port: int, addresses: Sequence[str]) -> None:
        super().__init__((host, port), _BootstrapHandler)
        ranks = [dict(zip(("rank_ip", "rank_port"), split(text))) for text in addresses]
        self.answers: dict[str, dict[str, Any]] = {str(n): rank for n, rank in enumerate(ranks)}
        """By rank; for `UNKNOWN`, all of prefill."""
        self.answers[UNKNOWN] = {
            "attn_tp_size": len(ranks),
            **dict.fromkeys(("attn_cp_size", "dp_size", "pp_size"), 1),
            **dict.fromkeys(("page_size", "kv_cache_dtype")),
            "follow_bootstrap_room": True,
        }


class _BootstrapHandler(BaseHTTPRequestHandler):
    server: BootstrapServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        (rank,) = parse_qs(url.query).get("target_tp_rank", [UNKNOWN])[:1]
        answer = self.server.answers.get(rank) if url.path == "/route" else None
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

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
    return tcp_text((host, port)) if port else host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+", help="endpoint addresses of prefill's ranks")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8998)
    options = parser.parse_args()
    with BootstrapServer(options.host, options.port, options.addresses) as server:
        print(f"{len(options.addresses)} ranks at http://{options.host}:{server.server_port}/route")
        server.serve_forever()


if __name__ == "__main__":
    main()
