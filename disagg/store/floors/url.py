"""URLs of floors: what they may say, and in which words another is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpool.layout.text import nearest
from kvpool.layout.units import parse_memory

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.=-]*)*")
_LABEL = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,253}")
EXAMPLES = {
    "memory": "memory://name",
    "file": "file:///path",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "mooncake": "mooncake://host:50051",
}
"""By scheme: what its URLs look like."""


@dataclass(frozen=True)
class FloorURL:
    """The parts of a floor's URL. `place` is the bucket, the container, the host or the name of a
    memory; `path` is absolute for `file` and a prefix of names elsewhere.
    """

    text: str
    scheme: str
    place: str
    port: int
    path: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.text


def _seconds(text: str) -> float:
    number = float(text)
    if not 0.1 <= number <= 600:
        raise ValueError("0.1 to 600 seconds.")
    return number


def _port(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < number < 1 << 16:
        raise ValueError("a port, 1 to 65535.")
    return number


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise ValueError("an address such as https://host:9000, without a user.")
    return text.rstrip("/")


def _word(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.,-]{1,64}", text):
        raise ValueError("letters, digits, '_', '.', ',' and '-'.")
    return text


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError("tcp or rdma.")
    return text


_NETWORK: dict[str, Callable[[str], Any]] = {"timeout": _seconds}
OPTIONS: dict[str, dict[str, Callable[[str], Any]]] = {
    "memory": {},
    "file": {},
    "s3": _NETWORK | {"endpoint": _endpoint, "region": _word},
    "gs": _NETWORK,
    "az": _NETWORK,
    "mooncake": {
        "memory": parse_memory,
        "staging": parse_memory,
        "http": _port,
        "address": _word,
        "protocol": _protocol,
        "device": _word,
    },
}
"""By scheme: the options behind `?`, and what reads each. They raise ValueError with what it may
be."""


def parse_url(text: str) -> FloorURL:
    """Raises ValueError, in a sentence that has a URL as it should be."""
    if text != text.strip() or not text.isprintable():
        raise ValueError(f"store {text!r}: a URL without spaces around it or control characters.")
    if "@" in text:  # and so it is not shown
        raise ValueError(
            "store: a URL has no user or password; credentials belong in the environment."
        )
    scheme, colon, _ = text.partition("://")
    if not colon or scheme not in EXAMPLES:
        like = ", ".join(EXAMPLES.values())
        raise ValueError(f"store {text!r}: one of {like}.{nearest(scheme, EXAMPLES)}")
    try:
        parts = urlsplit(text)
        options = _options(scheme, parts.query)
        if parts.fragment or text.endswith("#"):
            raise ValueError("'#' is not part of it; write it as %23.")
        place, port, path = _PARSERS[scheme](parts.netloc, unquote(parts.path, errors="strict"))
    except ValueError as error:
        raise ValueError(f"store {text!r}: {error} Such as {EXAMPLES[scheme]}.") from None
    return FloorURL(text=text, scheme=scheme, place=place, port=port, path=path, options=options)


def _options(scheme: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        parsers = OPTIONS[scheme]
        if name not in parsers:
            names = ", ".join(parsers) or "none"
            raise ValueError(f"option {name!r}; known are {names}.{nearest(name, parsers)}")
        if name in options:
            raise ValueError(f"option {name!r} twice.")
        try:
            options[name] = parsers[name](value)
        except ValueError as error:
            raise ValueError(f"option {name}={value!r}: {error}") from None
    return options


def _memory(netloc: str, path: str) -> tuple[str, int, str]:
    if path or not _LABEL.fullmatch(netloc):
        raise ValueError("a name of letters, digits, '_', '.' and '-', and no path.")
    return netloc, 0, ""


def _file(netloc: str, path: str) -> tuple[str, int, str]:
    if netloc:
        raise ValueError(f"a path begins with '/': '{netloc}' stands where a host would.")
    if len(path) < 2 or "\0" in path or ".." in path.split("/"):
        raise ValueError("an absolute path of a folder, without '..'.")
    return "", 0, path


def _bucket(netloc: str, path: str) -> tuple[str, int, str]:
    if not _BUCKET.fullmatch(netloc):
        raise ValueError(f"bucket {netloc!r}: letters, digits, '.', '-' and '_'.")
    prefix = path.strip("/")
    if prefix and not _PREFIX.fullmatch(prefix):
        raise ValueError(f"prefix {prefix!r}: parts of letters, digits, '_', '.', '=' and '-'.")
    return netloc, 0, prefix


def _master(netloc: str, path: str) -> tuple[str, int, str]:
    host, colon, port = netloc.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise ValueError("a host's name or IPv4 address, and the port of mooncake_master.")
    if path not in ("", "/"):
        raise ValueError("no path: a master has one space of names.")
    try:
        return host, _port(port), ""
    except ValueError as error:
        raise ValueError(f"port {port!r}: {error}") from None


_PARSERS = {
    "memory": _memory,
    "file": _file,
    "s3": _bucket,
    "gs": _bucket,
    "az": _bucket,
    "mooncake": _master,
}
