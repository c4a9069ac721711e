"""What moved a check's bytes, and what protected its messages."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disagg.connectors.settings import Settings
from disagg.engines.nixl.agent import WHEELS

LOG = "ucx.log"
READS = "remote memory read"
LANE = re.compile(r"\b[a-z][a-z0-9_]*/[A-Za-z0-9_][\w.:-]*")
TITLE, ROW = 2, 4
"""Cells of UCX's tables, with what is behind the last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTransport:
    """`bytes` and `messages` in words; `lanes` are UCX's, each a transport and a device, None where
    no UCX moves bytes or where it was loaded before it could be asked.
    """

    engine: str
    bytes: str
    messages: str
    lanes: list[str] | None = None


@contextmanager
def watched_ucx(folder: Path) -> Iterator[None]:
    """Lets UCX write there what it chooses, if it is not loaded yet: NIXL does not tell. Processes
    that are started later find no variable that names the folder.
    """
    if any(name.partition(".")[0] in WHEELS for name in sys.modules):
        yield
        return
    variables = {
        "UCX_LOG_FILE": str(folder / LOG),
        "UCX_LOG_LEVEL": "info",
        "UCX_PROTO_INFO": "y",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def transport_of(settings: Settings, folder: Path) -> UsedTransport:
    """Of a check whose bytes have moved."""
    options, engine, lanes = settings.engine_options, settings.engine, None
    if engine == "nixl":
        backend = options.get("backend", "UCX")
        lanes = _lanes(folder / LOG) if backend == "UCX" else None
        words = f"{backend} over {', '.join(lanes)}" if lanes else f"{backend}, not known over what"
    elif engine == "local":
        words = "memory of one host"
    elif engine == "mooncake":
        device = f", {options['device']}" if options.get("device") else ""
        words = f"{options.get('protocol', 'tcp')}{device}"
    else:
        words = ", ".join(f"{name} {value}" for name, value in options.items()) or "its defaults"
    return UsedTransport(engine=engine, bytes=words, messages=_messages(settings), lanes=lanes)


def _messages(settings: Settings) -> str:
    if settings.keys is not None or settings.tls is not None:
        return "TLS 1.3, certificates of both sides"
    return "TCP without keys, for this check: any process may read them and connect"


def _lanes(log: Path) -> list[str] | None:
    """Transports and devices by which UCX reads a peer's memory: those of its tables about that,
    whose titles are rows of one cell.
    """
    # UCX writes when its buffer is full
    ctypes.CDLL(None).fflush(None)
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    lanes, reads = dict[str, None](), False
    for line in lines:
        cells = line.partition("|")[2].split("|")
        if len(cells) == TITLE:
            reads = READS in cells[0]
        elif reads and len(cells) == ROW:
            lanes.update(dict.fromkeys(LANE.findall(cells[2])))
    return [*lanes] or None
