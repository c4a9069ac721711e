"""Contracts from where they are: files, and the HTTP ports of running engines."""

from __future__ import annotations

import re
import socket
import time
from os.path import isfile
from pathlib import Path
from urllib.parse import urlsplit

from disagg.contract.contract import MAX_BYTES, Contract, joined

SECONDS = 30.0
"""To connect, and for the whole answer."""
PIECE = 1 << 20
MAX_HEAD = 64 << 10
PLACE = "a running engine is http://HOST:PORT."


def read_contract(source: str) -> Contract:
    """A file's, or that of an engine at `http://HOST:PORT`; several of them, separated by commas,
    are those of the ranks of one engine. Where each rank serves its own (SGLang), one address is
    enough: the other ranks are asked at the ports beside it.

    Raises ValueError with the source and the reason.
    """
    sources = [source] if isfile(source) else source.split(",")
    contracts = [_one(part.strip()) for part in sources]
    if len(contracts) == 1 and source.startswith("http://"):
        (own,) = contracts
        if len(own.ranks) == 1 and own.missing:
            contracts += _beside(source, own)
    try:
        return joined(contracts)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _beside(source: str, own: Contract) -> list[Contract]:
    """Those of the other ranks on the same host."""
    url = urlsplit(source)
    first = (url.port or 80) - own.ranks[0].number
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    try:
        return [_one(f"http://{host}:{first + number}") for number in own.missing]
    except ValueError as error:
        raise ValueError(
            f"{error} {source} is of one rank of {own.size}: give the addresses of all of them, "
            "separated by commas, where they are not on one host."
        ) from None


def _one(source: str) -> Contract:
    try:
        return Contract.from_json(_fetched(source) if "://" in source else _file(source))
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}.") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _fetched(source: str) -> bytes:
    """What an engine answers. No redirection is followed, and no proxy is asked."""
    url = urlsplit(source)
    if (url.scheme, url.query, url.fragment, url.username) != ("http", "", "", None):
        raise ValueError(PLACE)
    if not url.hostname or url.path not in ("", "/", "/contract"):
        raise ValueError(PLACE)
    place, deadline, data = (url.hostname, url.port or 80), time.monotonic() + SECONDS, bytearray()
    with socket.create_connection(place, timeout=SECONDS) as connection:
        request = f"GET /contract HTTP/1.0\r\nHost: {url.netloc}\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(PIECE)
            if not piece:
                return _body(bytes(data))
            data += piece
            if len(data) > MAX_BYTES + MAX_HEAD:
                raise ValueError(f"more than {MAX_BYTES} bytes, which are more than are read.")
    raise TimeoutError("it has not answered in time")


def _body(answer: bytes) -> bytes:
    """Of an HTTP answer. Raises ValueError for what is none, or is not what was asked for."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] ([0-9]{3})\b", head)
    if status is None:
        raise ValueError("no HTTP server answers there.")
    if status[1] != b"200":
        raise ValueError(f"it answers {int(status[1])} to GET /contract: no engine's contract.")
    return body
