"""A real engine, one read of which fails although its bytes land later: when it is told to."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch

WHICH = 5
"""Number of the read that fails."""


class LateEngine(LocalEngine):
    """The bytes land once there is a file `gate`, which is removed then. `fence` is the answer of a
    fence before that: False, True (wrongly), or None (TransferError, then and later).
    """

    def __init__(self, fence: bool | None, gate: Path) -> None:
        super().__init__()
        self._answer, self._gate = fence, gate
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
            if self._answer is None:
                raise TransferError("the engine cannot tell")
            if not self._landed.is_set():
                return self._answer
        return super().fence(peer, timeout)

    def close(self):
        self._broken = None
        super().close()

    def _land(self, peer, batch):
        while not self._gate.exists():
            time.sleep(0.001)
        transfer = super().read(peer, batch)
        while not self.poll(transfer):
            time.sleep(0.001)
        self._landed.set()
        self._gate.unlink()
