"""Mooncake's package, and calls into it that fail, block or outlive their own error.

A failed call says nothing about what is still in flight: bytes land until the `TransferEngine` that
made it is destroyed. So each peer is read through a `TransferEngine` and a thread of its own.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from disagg.engines.base import EngineUnavailable, TransferError
from disagg.plan.bind import CopyBatch

CALL_RUNS = 1024
"""Runs in one call. More would wait in a second queue, where a second of waiting is an error."""
SWITCHES = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
"""What makes Mooncake take a transport or fail: the protocol that it is told is ignored."""
DEFAULTS = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3"}
"""Where the environment says nothing else: seconds without progress after which a call fails."""
WAKE = struct.pack("ll", 0, 1000)
LISTENING = ":0000 0A "


def package() -> Any:
    """Mooncake's `engine` module; raises EngineUnavailable with what is missing."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise EngineUnavailable(
            "Mooncake is not installed. Install kvpool[mooncake], or kvpool[mooncake-cpu] where "
            "there is no CUDA."
        ) from None
    except ImportError as error:
        raise EngineUnavailable(
            f"Mooncake cannot be loaded: {error}. On Debian: apt-get install libibverbs1 "
            "librdmacm1 libnuma1 liburing2 libcurl4."
        ) from None


def choose(protocol: str) -> None:
    """Has Mooncake use this transport; raises EngineUnavailable if this process uses another."""
    for other, switch in SWITCHES.items():
        if other != protocol and switch in os.environ:
            raise EngineUnavailable(
                f"protocol {protocol!r}: {switch} is set, so Mooncake uses {other} in this process."
                " A process has one protocol."
            )
    if protocol in SWITCHES:
        os.environ.setdefault(SWITCHES[protocol], "1")


def moves_cuda() -> bool:
    """Whether Mooncake's CUDA build is the one that is installed."""
    try:
        distribution("mooncake-transfer-engine")
    except PackageNotFoundError:
        return False
    return True


def start(protocol: str, hostname: str, device: str) -> Any:
    """A `TransferEngine` that listens on ports of its own choice."""
    engine = package().TransferEngine()
    code = engine.initialize(hostname, "P2PHANDSHAKE", protocol, device)
    if code:
        raise TransferError(
            f"Mooncake cannot start {protocol} on {hostname} with device {device!r} (code {code}). "
            "MC_LOG_LEVEL=INFO says why."
        )
    return engine


def register(engine: Any, stretches: Iterable[tuple[int, int]]) -> None:
    """Registers addresses and lengths in bytes, each a region; raises TransferError at once."""
    for base, nbytes in stretches:
        code = engine.register_memory(base, nbytes)
        if code:
            raise TransferError(
                f"Mooncake cannot register {nbytes} bytes at {base:#x} (code {code}). Where a "
                "device limits what is registered at once, name a smaller `chunk`."
            )


def fetch(engine: Any, address: str, rows: Sequence[Sequence[int]]) -> bool:
    """Reads runs (sources, destinations, lengths) in one attempt; whether all have arrived.

    The call that submits and waits at once is not used: it repeats a failed attempt of which bytes
    are in flight, and then calls both a success.
    """
    src, dst, nbytes = rows
    number = engine.batch_transfer_async_read(address, dst, src, nbytes)
    # asked for once: that frees the number, and asking again would crash
    return bool(number) and bool(engine.get_batch_transfer_status([number]) == 0)


def hasten(engine: Any) -> None:
    """Wakes the engine's listener, for which its destructor waits, with Python's lock held.

    It would sleep for a second each time; the socket's time-out makes that a millisecond.
    """
    port = engine.get_rpc_port()
    with suppress(OSError):  # then it only takes longer
        for handle in _listeners(port):
            found = socket.socket(fileno=handle)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, WAKE)
            found.detach()  # it is Mooncake's
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


def _listeners(port: int) -> Iterator[int]:
    """Handles of this process that listen on a port."""
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


@dataclass(eq=False, slots=True)
class Transfer:
    """A read that was asked for; rows source, destination, length `[3, N]`."""

    rows: np.ndarray
    problem: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Link:
    """Reads from one peer, in order, by a thread of its own.

    `obtain` gives the `TransferEngine`, `kept` says that it is another's too and must not be
    destroyed, `scope` is what the thread works in. `token` is what the peer keeps at `token_at`;
    `scratch`, as large, must live as long as what `obtain` gives.
    """

    def __init__(
        self,
        address: str,
        token_at: int,
        token: bytes,
        scratch: np.ndarray,
        obtain: Callable[[], Any],
        kept: bool,
        scope: AbstractContextManager[Any],
    ) -> None:
        self._address, self._token_at, self._token = address, token_at, token
        self._scratch, self._obtain, self._kept, self._scope = scratch, obtain, kept, scope
        self._queue: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._given_up = self._doubt = self._ended = self._destroyed = False
        self._problem = "the peer was given up."
        self._thread = threading.Thread(target=self._run, name=f"mooncake {address}", daemon=True)
        self._thread.start()

    def read(self, batch: CopyBatch) -> Transfer:
        """Queues a read; the batch is copied."""
        transfer = Transfer(np.stack([batch.src, batch.dst, batch.nbytes]))
        with self._changed:
            if self._given_up or self._ended:
                raise TransferError(self._problem)
            self._queue.append(transfer)
            self._changed.notify_all()
        return transfer

    def give_up(self) -> None:
        """No call begins any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def quiet(self, timeout: float | None) -> bool:
        """Once given up: whether no byte can land. Raises TransferError if that is never known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._doubt, timeout)
            if not self._doubt or self._destroyed:
                return True
            if not self._ended:
                return False
        raise TransferError(
            f"{self._problem} Its bytes may land for as long as Mooncake lives in this process: "
            "all peers share one TransferEngine."
        )

    def join(self) -> None:
        """Waits until the thread has let its `TransferEngine` go."""
        self._thread.join()

    def _run(self) -> None:
        engine, problem, destroyed = None, None, False
        try:
            with self._scope:
                engine = self._obtain()
                self._meet(engine)
                self._serve(engine)
        except Exception as error:  # whatever it is, it ends the reads from this peer and no others
            problem = str(error)
        if engine is not None and not self._kept:
            gone = weakref.ref(engine)
            hasten(engine)
            engine = None
            destroyed = gone() is None
        with self._changed:
            self._ended, self._destroyed = True, destroyed
            self._problem = problem or self._problem
            while self._queue:
                transfer = self._queue.popleft()
                transfer.problem = self._problem
                transfer.ended.set()
            self._changed.notify_all()

    def _meet(self, engine: Any) -> None:
        """Makes sure that who answers is the peer. Nothing but the scratch is written."""
        if not self._token:
            return
        here, nbytes = self._scratch.ctypes.data, self._scratch.nbytes
        register(engine, [(here, nbytes)])
        if not fetch(engine, self._address, [[self._token_at], [here], [nbytes]]):
            raise TransferError(
                f"nobody answers at {self._address}. Is the peer alive, and is that an address of "
                "its host that can be reached from here? It says so by `hostname`."
            )
        engine.unregister_memory(here)
        if self._scratch.tobytes() != self._token:
            raise TransferError(
                f"another process answers at {self._address}. The peer names its own host by "
                "`hostname`."
            )

    def _serve(self, engine: Any) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._given_up)
                if self._given_up:
                    return
                transfer = self._queue[0]
            for start in range(0, transfer.rows.shape[1], CALL_RUNS):
                rows = transfer.rows[:, start : start + CALL_RUNS].tolist()
                with self._changed:
                    if self._given_up:
                        return
                    self._doubt = True
                if not fetch(engine, self._address, rows):
                    raise TransferError(
                        f"Mooncake cannot read {len(rows[0])} runs from {self._address}: dead, "
                        "stopped or out of reach. Its log on stderr says more."
                    )
                with self._changed:
                    self._doubt = False
                    self._changed.notify_all()
            with self._changed:
                self._queue.popleft()
            transfer.ended.set()
