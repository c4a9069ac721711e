"""Reads from one peer through Mooncake, in a thread.

Bytes of a failed call land until the `TransferEngine` that made it is destroyed, so each peer is
read through a `TransferEngine` and a thread of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.mooncake.package import fetch, hasten, register_ranges
from disagg.plan.bind import CopyBatch

CALL_RUNS = 1023
"""Runs per call, and one to poll. More than 1024 would wait in a second queue, where waiting for a
second is an error.
"""
POLLED_BYTES = 1 << 20
"""Shorter reads end before a pause is worth it."""


@dataclass(eq=False, slots=True)
class MooncakeTransfer:
    """A requested read: rows of sources, destinations and lengths, `[3, N]`."""

    rows: np.ndarray
    problem: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class PeerThread:
    """Reads from one peer, in order, in a thread.

    `obtain` returns the `TransferEngine`; with `shared` other peers use it too, and it is not
    destroyed. The thread works in the context `scope`; with `polls` it leaves the core to others
    while Mooncake's threads read. `token` are the bytes that the peer keeps at
    `token_at`; `scratch` has their size and must live as long as the `TransferEngine`. `tell` is
    called when a read has ended.
    """

    def __init__(
        self,
        address: str,
        token_at: int,
        token: bytes,
        scratch: np.ndarray,
        obtain: Callable[[], Any],
        shared: bool,
        scope: AbstractContextManager[Any],
        polls: bool,
        tell: Callable[[], None],
    ) -> None:
        self._address, self._token_at, self._token = address, token_at, token
        self._scratch, self._obtain, self._shared, self._scope = scratch, obtain, shared, scope
        self._polls, self._tell = polls, tell
        self._queue: deque[MooncakeTransfer] = deque()
        self._changed = threading.Condition()
        self._given_up = self._doubt = self._ended = self._destroyed = False
        self._problem = "the peer was given up."
        self._thread = threading.Thread(target=self._run, name=f"mooncake {address}", daemon=True)
        self._thread.start()

    def read(self, batch: CopyBatch) -> MooncakeTransfer:
        """Queues a read; the batch is copied."""
        transfer = MooncakeTransfer(np.stack([batch.src, batch.dst, batch.nbytes]))
        with self._changed:
            if self._given_up or self._ended:
                raise TransferError(self._problem)
            self._queue.append(transfer)
            self._changed.notify_all()
        return transfer

    def give_up(self) -> None:
        """Starts no further call."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def quiet(self, timeout: float | None) -> bool:
        """After `give_up`: whether no byte can land. Raises TransferError if it is unknowable."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._doubt, timeout)
            if not self._doubt or self._destroyed:
                return True
            if not self._ended:
                return False
        raise TransferError(
            f"{self._problem} Its bytes may still land until this process ends: all peers share "
            "one TransferEngine."
        )

    def join(self) -> None:
        """Waits until the thread has released its `TransferEngine`."""
        self._thread.join()

    def _run(self) -> None:
        engine, problem, destroyed = None, None, False
        try:
            with self._scope:
                engine = self._obtain()
                self._verify_peer(engine)
                self._serve(engine)
        except Exception as error:  # it fails the reads from this peer only
            problem = str(error)
        if engine is not None and not self._shared:
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
        self._tell()

    def _verify_peer(self, engine: Any) -> None:
        """Checks that the peer answers, and no other process. Writes the scratch only."""
        if not self._token:
            return
        here, nbytes = self._scratch.ctypes.data, self._scratch.nbytes
        register_ranges(engine, [(here, nbytes)])
        if not fetch(engine, self._address, [[self._token_at], [here], [nbytes]]):
            raise TransferError(
                f"no answer at {self._address}. Check that the peer is alive, and that its "
                "`hostname` can be reached from here."
            )
        engine.unregister_memory(here)
        if self._scratch.tobytes() != self._token:
            raise TransferError(
                f"another process answers at {self._address}. Set the peer's `hostname` to its "
                "own host."
            )

    def _serve(self, engine: Any) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._given_up)
                if self._given_up:
                    return
                transfer = self._queue[0]
            for start in range(0, transfer.rows.shape[1], CALL_RUNS):
                part = transfer.rows[:, start : start + CALL_RUNS]
                rows, polled = part.tolist(), self._polls and part[2].sum() >= POLLED_BYTES
                with self._changed:
                    if self._given_up:
                        return
                    self._doubt = True
                if not fetch(engine, self._address, rows, polled=bool(polled)):
                    raise TransferError(
                        f"Mooncake cannot read {len(rows[0])} runs from {self._address}: the peer "
                        "is dead, stopped or out of reach. See Mooncake's log on stderr."
                    )
                with self._changed:
                    self._doubt = False
                    self._changed.notify_all()
            with self._changed:
                self._queue.popleft()
            transfer.ended.set()
            self._tell()
