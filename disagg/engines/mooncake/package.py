"""Mooncake's Python package: start, register, read once, stop."""

from __future__ import annotations

import importlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from disagg.engines.base import EngineUnavailable, TransferError
from kvpool.extras import install

SWITCHES = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
"""Variables that force a transport. Mooncake ignores the protocol that it is given."""
DEFAULTS = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3"}
"""Set unless the environment sets them. A call fails after 3 seconds without progress."""
IPV6 = "MC_USE_IPV6"
"""A variable: if it has any value, Mooncake of this process dials IPv6 only."""
CUDA_BUILDS = "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"
"""Distributions whose engine reads and writes CUDA memory."""
IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}")
WAKE = struct.pack("ll", 0, 1000)
LISTENING = ":0000 0A "
PAUSES = 0.00005, 0.0005
"""Seconds between two questions whether a read has ended, the first and the longest."""
POLLED_SECONDS = 30.0
"""How long they are asked. Then Mooncake's own limits count."""


def package() -> Any:
    """Mooncake's `engine` module. Raises EngineUnavailable with what is missing."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise EngineUnavailable(
            f"Mooncake is not installed: {install('mooncake')}, without CUDA "
            f"{install('mooncake-cpu')}"
        ) from None
    except ImportError as error:
        raise EngineUnavailable(
            f"Mooncake cannot be loaded: {error}. On Debian: apt-get install libibverbs1 "
            "librdmacm1 libnuma1 liburing2 libcurl4."
        ) from None


def choose(protocol: str) -> None:
    """Forces a transport. Raises EngineUnavailable if this process already uses another."""
    for name, switch in SWITCHES.items():
        if name != protocol and switch in os.environ:
            raise EngineUnavailable(
                f"protocol {protocol!r}: {switch} is set, so this process uses {name}. A process "
                "has one protocol."
            )
    if protocol in SWITCHES:
        os.environ.setdefault(SWITCHES[protocol], "1")


def check_family(hostname: str, *, dialled: bool) -> None:
    """Raises ValueError for an IP address at which Mooncake of this process cannot be read, or
    which it cannot dial.
    """
    if hostname.startswith("["):
        if IPV6 not in os.environ:
            raise ValueError(
                f"hostname {hostname}: Mooncake needs the variable {IPV6}=1 for IPv6, on both "
                "sides. Set it, or give the engine of prefill a hostname of IPv4."
            )
    elif dialled and IPV6 in os.environ and IPV4.fullmatch(hostname):
        raise ValueError(
            f"hostname {hostname}: the variable {IPV6} is set, and Mooncake dials IPv6 only. Unset "
            "it, or give the engine of prefill a hostname of IPv6."
        )


def moves_cuda() -> bool:
    """Whether a CUDA build of Mooncake is installed."""
    for name in CUDA_BUILDS:
        with suppress(PackageNotFoundError):
            distribution(name)
            return True
    return False


def start(protocol: str, hostname: str, device: str) -> Any:
    """A `TransferEngine` that listens on ports that Mooncake chooses."""
    engine = package().TransferEngine()
    code = engine.initialize(hostname, "P2PHANDSHAKE", protocol, device)
    if code:
        raise TransferError(
            f"Mooncake cannot start {protocol} on {hostname} with device {device!r} (code {code}). "
            "Set MC_LOG_LEVEL=INFO for the reason."
        )
    return engine


def register_ranges(engine: Any, ranges: Iterable[tuple[int, int]]) -> None:
    """Registers pointers and lengths in bytes, each a region. Raises TransferError."""
    for base, nbytes in ranges:
        code = engine.register_memory(base, nbytes)
        if code:
            raise TransferError(
                f"Mooncake cannot register {nbytes} bytes at {base:#x} (code {code}). If the "
                "device limits the size of a registration, set a smaller `chunk`."
            )


def fetch(engine: Any, address: str, rows: list[list[int]], *, polled: bool = False) -> bool:
    """Reads runs (sources, destinations, lengths) in one attempt; whether all bytes arrived.

    The call that waits for the end of a batch keeps a core busy, which Mooncake's own threads need.
    If `polled`, the last byte is read once more behind the batch, and waited for with pauses. So
    this takes a run more, and is for transports that read one run after the other.

    `batch_transfer_sync_read` is not used: it retries while bytes of the failed attempt are still
    in flight, and reports success.
    """
    src, dst, nbytes = rows
    number = engine.batch_transfer_async_read(address, dst, src, nbytes)
    if number and polled:
        end = nbytes[-1] - 1
        last = engine.batch_transfer_async_read(address, [dst[-1] + end], [src[-1] + end], [1])
        if not (last and _poll(engine, last)):
            return False
    # the status frees the number: a second call would crash
    return bool(number) and bool(engine.get_batch_transfer_status([number]) == 0)


def _poll(engine: Any, number: int) -> bool:
    """Whether a read of one run arrives; asks with pauses."""
    pause, until = PAUSES[0], time.monotonic() + POLLED_SECONDS
    while time.monotonic() < until:
        if status := engine.transfer_check_status(number):  # this frees the number
            return bool(status > 0)
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])
    return bool(engine.get_batch_transfer_status([number]) == 0)


def hasten(engine: Any) -> None:
    """Shortens the wait of the engine's destructor, which holds the GIL, from a second to a
    millisecond: sets the listening socket's time-out and wakes it.
    """
    port = engine.get_rpc_port()
    with suppress(OSError):  # destruction then takes a second
        for handle in _listeners(port):
            listener = socket.socket(fileno=handle)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, WAKE)
            listener.detach()  # Mooncake owns it
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


def _listeners(port: int) -> Iterator[int]:
    """Descriptors of this process that listen on a port."""
    lines = [
        line
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()
        if f":{port:04X} " in line and LISTENING in line
    ]
    names = {f"socket:[{line.split()[9]}]" for line in lines}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if os.readlink(f"/proc/self/fd/{entry}") in names:
                yield int(entry)
