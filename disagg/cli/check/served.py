"""Prefill's part of a check as a process of its own, where prefill is on this host."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from disagg.cli.check.rooms import Refused
from disagg.connectors.settings import Settings
from disagg.contract.contract import Contract
from disagg.runtime.sockets.address import Address
from disagg.runtime.sockets.hosts import host_text

SPARE_SECONDS = 60.0
"""How much longer than the check it may live: it is ended with the check."""


def place_here(contract: Contract, settings: Settings) -> str | None:
    """Where prefill's part can listen beside the ranks of the contract; None if a rank is on
    another host. Ranks without a TCP address are read on their own host only.
    """
    addresses = [Address.parse(rank.address) for rank in contract.ranks if rank.address]
    if not all(map(_of_this_host, addresses)):
        return None
    if addresses:
        return f"tcp://{host_text(addresses[0].host)}:*"
    return "ipc://*" if settings.keys is None else "tcp://127.0.0.1:*"


@contextmanager
def served(arguments: Sequence[str], timeout: float) -> Iterator[Sequence[str]]:
    """`kvpool check` with these arguments (`--serve` among them): the addresses that it has.
    Raises Refused if it cannot serve.
    """
    line = [sys.executable, "-m", "kvpool", "check", *arguments, "--json"]
    line += ["--timeout", str(timeout + SPARE_SECONDS)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            answer = process.stdout.readline() if process.stdout else b""
            if not answer:
                errors.seek(0)
                raise Refused("engine", errors.read().decode(errors="replace").strip())
            yield json.loads(answer)["serves"]
        finally:
            process.terminate()


def _of_this_host(address: Address) -> bool:
    """Whether this host could listen at an address of TCP."""
    try:
        for family, place in address.resolve():
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((place[0], 0, *place[2:]))
    except (OSError, UnicodeError):
        return False
    return True
