"""Engines whose package blocks in its calls: each peer is read in a thread of its own.

Bytes of a failed read may land until the package's object that made it is destroyed. So a peer's
thread has an object of its own, a `BlockingReader`, and ends it before it reports a failure.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.engines.ranges import Ranges
from disagg.host.interfaces import is_loopback, leads_back
from disagg.host.system_calls import Waker
from disagg.log import log
from disagg.plan.bind import CopyBatch
from kvpool.layout.grid import Ints

GIVEN_UP = "the peer was given up."
LOOPBACK = "127.0.0.1"
GIL_SECONDS = 50e-6  # for which a caller's step lets it go while a thread reads


class BlockingReader(ABC):
    """Reads from one peer by an object of the package. One thread calls it, in `scope`."""

    scope: AbstractContextManager[Any] = nullcontext()
    undestroyed: ClassVar[str]
    """Why bytes of a failed read may land after `end`."""

    @abstractmethod
    def start(self) -> None:
        """Makes the package's object; writes no registered memory. Raises TransferError."""

    @abstractmethod
    def calls(self, rows: Ints) -> Sequence[Any]:
        """Sources, destinations and lengths, `[3, N]`, as arguments of `fetch`, in order."""

    @abstractmethod
    def fetch(self, call: Any) -> None:
        """Reads runs. If this raises TransferError, bytes of them may still land."""

    def give_up(self) -> None:
        """Makes `fetch` end soon, where the package can; called from another thread."""

    @abstractmethod
    def end(self) -> bool:
        """Destroys the package's object; whether it is gone, so that no further byte can land."""


@dataclass(eq=False, slots=True)
class ThreadedTransfer:
    """A requested read: rows of sources, destinations and lengths, `[3, N]`."""

    rows: Ints
    problem: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class ThreadedPeer:
    """A peer's ranges, and the thread that reads them in order and calls `tell` after each read."""

    def __init__(
        self, name: str, reader: BlockingReader, ranges: Ranges, tell: Callable[[], None]
    ) -> None:
        self.ranges = ranges
        self._reader, self._tell = reader, tell
        self._queue: deque[ThreadedTransfer] = deque()
        self._changed = threading.Condition()
        self._given_up = False
        # whether a call runs or has failed, whose bytes may land
        self._doubt = False
        # once the thread has ended: whether no byte can land any more
        self._silent: bool | None = None
        self._problem = GIVEN_UP
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def read(self, batch: CopyBatch) -> ThreadedTransfer:
        """Queues a read; the batch is copied."""
        transfer = ThreadedTransfer(np.stack([batch.src, batch.dst, batch.nbytes]))
        with self._changed:
            if self._given_up or self._silent is not None:
                raise TransferError(self._problem)
            self._queue.append(transfer)
            self._changed.notify_all()
        return transfer

    @property
    def reads(self) -> bool:
        """Whether its thread has something to read."""
        return bool(self._queue)

    def give_up(self) -> None:
        """Starts no further call."""
        self._reader.give_up()
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def quiet(self, timeout: float | None) -> bool:
        """After `give_up`: whether no byte can land. Raises TransferError if it is unknowable."""
        with self._changed:
            self._changed.wait_for(lambda: self._silent is not None or not self._doubt, timeout)
            if self._silent is not False:
                return self._silent or not self._doubt
        reason = f"Its bytes may still land until this process ends: {self._reader.undestroyed}"
        raise TransferError(f"{self._problem} {reason}")

    def join(self) -> None:
        """Waits until the thread has ended its reader."""
        self._thread.join()

    def _run(self) -> None:
        problem = None
        try:
            with self._reader.scope:
                self._reader.start()
                self._serve()
        except Exception as error:  # it fails the reads from this peer only
            problem = str(error)
        # not in the `except`: the traceback would keep the package's object alive
        destroyed = self._reader.end()
        with self._changed:
            self._silent = destroyed or not self._doubt
            self._problem = problem or self._problem
            while self._queue:
                transfer = self._queue.popleft()
                transfer.problem = self._problem
                transfer.ended.set()
            self._changed.notify_all()
        self._tell()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._given_up)
                if self._given_up:
                    return
                transfer = self._queue[0]
            for call in self._reader.calls(transfer.rows):
                with self._changed:
                    if self._given_up:
                        return
                    self._doubt = True
                self._reader.fetch(call)
                with self._changed:
                    self._doubt = False
                    self._changed.notify_all()
            with self._changed:
                self._queue.popleft()
            transfer.ended.set()
            self._tell()


class ThreadedEngine(Engine[ThreadedPeer, ThreadedTransfer | None]):
    """What such engines have in common."""

    max_bytes = 128 << 20  # a read is queued for a thread, which returns to Python once a call
    parts_in_flight = 4
    background = True
    progress_seconds = 0.05  # the package's threads or NICs answer peers
    ports: ClassVar[str] = ""
    """Which ports a firewall must keep closed, if they are known."""
    shared: ClassVar[bool] = False
    """Whether all readers use one object, which `close` destroys once all threads let go of it."""

    def __init__(self, hostname: str | None) -> None:
        """Peers reach this process as `hostname`; None: as its endpoint (`reached_at`)."""
        self._given, self._hostname = hostname, hostname or LOOPBACK
        self._ranges: list[tuple[int, int]] = []
        self._own = Ranges.of([])
        self._peers: list[ThreadedPeer] = []
        self._waker = Waker()
        self._exposed = False

    def reached_at(self, host: str) -> None:
        if self._given is None:
            self._hostname = f"[{host}]" if ":" in host else host
        elif not is_loopback(host) and leads_back(self._given):
            raise ValueError(
                f"engine {self.name}: hostname={self._given!r} leads a peer on another host to "
                f"itself, while its endpoint is offered at {host}. Leave hostname out, or give one "
                "that leads here."
            )

    def notify(self, descriptor: int) -> None:
        self._waker.set(descriptor)

    def read(self, peer: ThreadedPeer, batch: CopyBatch) -> ThreadedTransfer | None:
        """Queues the batch for the peer's thread, cut at the edges of registered ranges."""
        if not batch.runs:
            return None
        batch = peer.ranges.cut(batch, batch.src, "the peer")
        return peer.read(self._own.cut(batch, batch.dst, "this engine"))

    def poll(self, transfer: ThreadedTransfer | None) -> bool:
        """Whether the thread has completed it."""
        if transfer is None:
            return True
        if not transfer.ended.is_set():
            return False
        if transfer.problem is not None:
            raise TransferError(transfer.problem)
        return True

    def yield_gil(self) -> None:
        if any(peer.reads for peer in self._peers):
            time.sleep(GIL_SECONDS)

    def fence(self, peer: ThreadedPeer, timeout: float | None = None) -> bool:
        """Waits for the running call; after a failed one, until its reader is destroyed."""
        peer.give_up()
        quiet = peer.quiet(timeout)
        if quiet and not self.shared and peer in self._peers:
            self._peers.remove(peer)
        return quiet

    def close(self) -> None:
        """Gives up all peers, and waits for calls that may write."""
        for peer in self._peers:
            peer.give_up()
        while self._peers:
            peer = self._peers.pop()
            if self.shared:
                peer.join()
            else:
                peer.quiet(None)
        self._waker.close()

    def _claim(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Takes pointers and lengths that are to be registered. Raises TransferError."""
        try:
            self._own = Ranges.of([*self._ranges, *ranges])
        except ValueError as error:
            raise TransferError(f"slabs: {error}") from None

    def _connected(self, name: str, reader: BlockingReader, ranges: Ranges) -> ThreadedPeer:
        peer = ThreadedPeer(name, reader, ranges, self._waker.wake)
        self._peers.append(peer)
        return peer

    def _warn_exposed(self, port: int, hostname: str) -> None:
        """Says once that registered memory can be reached from other hosts."""
        if self._exposed or is_loopback(hostname):
            return
        self._exposed = True
        log.warning(
            "engine %s at %s: any process that reaches its port %d can read and overwrite the "
            "registered memory, also where endpoints have keys. Let a firewall admit only this "
            "deployment's hosts%s (docs/security.md).",
            self.name,
            hostname,
            port,
            self.ports,
        )
