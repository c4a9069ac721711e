"""A real engine of which one read fails, and whose bytes land all the same, later."""

from __future__ import annotations

import threading
import time

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch

WHICH = 5
"""The read that fails."""


class LateEngine(LocalEngine):
    """`fence` is what a fence says before these bytes have landed: False, True (which is a lie), or
    None (it cannot be known, then or ever).
    """

    def __init__(self, fence: bool | None, seconds: float) -> None:
        super().__init__()
        self._says, self._seconds = fence, seconds
        self._reads = 0
        self._broken: object = None
        self._landed = threading.Event()

    def read(self, peer, batch):
        self._reads += 1
        if self._reads != WHICH:
            return super().read(peer, batch)
        self._broken = peer
        kept = CopyBatch(batch.src.copy(), batch.dst.copy(), batch.nbytes.copy())
        threading.Thread(target=self._land, args=(peer, kept), daemon=True).start()
        raise TransferError("the cable was pulled")

    def fence(self, peer, timeout=None):
        if peer is self._broken:
            if self._says is None:
                raise TransferError("nobody can know")
            if not self._landed.is_set():
                return self._says
        return super().fence(peer, timeout)

    def close(self):
        self._broken = None
        super().close()

    def _land(self, peer, batch):
        time.sleep(self._seconds)
        super().read(peer, batch)
        self._landed.set()
