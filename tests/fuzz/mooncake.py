"""Metadata of engine `mooncake`: a peer whose ranges hold what they say, or a refusal.

Nobody is called: the thread that reads a peer is not started.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.mooncake import MooncakeEngine
from disagg.plan.bind import CopyBatch
from tests.fuzz import build
from tests.fuzz.guard import Finding


def run(data: bytes) -> str:
    engine = MooncakeEngine()
    try:
        with patch("disagg.engines.threaded.threading.Thread"):
            peer = engine.connect(data)
    except TransferError:
        return "refused"
    starts, ends = peer.ranges.starts[:3].tolist(), peer.ranges.ends[:3].tolist()
    for start, end in zip(starts, ends):
        for at, size in ((start, end - start), (end - 1, 1), (start, end - start + 1)):
            whole = CopyBatch(*np.array([[at], [1 << 20], [size]], dtype=np.int64))
            try:
                cut = peer.ranges.cut(whole, whole.src, "the peer")
            except TransferError:
                continue
            _check(cut, at, at + size, list(zip(peer.ranges.starts, peer.ranges.ends)))
    return "connected"


def _check(cut: CopyBatch, start: int, stop: int, ranges: list[tuple[int, int]]) -> None:
    """The parts make up the run, and each lies in one range."""
    at = start
    for src, size in zip(cut.src.tolist(), cut.nbytes.tolist()):
        if src != at or not any(low <= src and src + size <= high for low, high in ranges):
            raise Finding(f"{size} bytes at {src:#x} of a run from {start:#x} to {stop:#x}.")
        at += size
    if at != stop:
        raise Finding(f"a run to {stop:#x} ends at {at:#x}.")


def seeds() -> Iterator[bytes]:
    """Peers of one range and of several, separate and adjacent."""
    common = {"protocol": "tcp", "hostname": "127.0.0.1", "port": 15000, "token_at": 1 << 40}
    for ranges in (
        [(1 << 40, 4096)],
        [(1 << 40, 4096), ((1 << 40) + 4096, 64), (1 << 41, 64)],
        [((n + 1) << 30, 1 << 30) for n in range(5)],
        [],
    ):
        yield build.packed({**common, "token": bytes(MooncakeEngine.token_bytes), "ranges": ranges})
