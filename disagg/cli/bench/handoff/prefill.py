"""The peer process of hand-offs: a prefill endpoint, and a bare engine over the same memory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import NamedTuple

import torch

from disagg.cli.bench.handoff.request import block_table, fill, pool_of
from disagg.cli.bench.peer import READER_TIMEOUT, BareServer
from disagg.engines.base import TransferError, create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.prefill_endpoint import PrefillEndpoint

SETTLE_SECONDS = 0.003
"""Before the last chunk, so that both endpoints wait for it, as they do where it is computed."""
SOURCE_SEED = 1


class PrefillOffer(NamedTuple):
    """What decode needs to know: the endpoint's address, the bare engine's metadata, the layout."""

    address: str
    metadata: bytes
    layout: bytes


class TimedPrefill(BareServer):
    """Called by the other process. One model, engine and request at a time."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self._device, self._stack = device, ExitStack()

    def open(self, engine: str, family: str, tokens: int) -> PrefillOffer:
        """Serves a pool for requests of up to `tokens` tokens."""
        self.stop()
        self._stack.close()
        self._pool = pool = pool_of(family, tokens, self._device)
        self._endpoint = PrefillEndpoint(pool.layout, create_engine(engine))
        self._stack.enter_context(self._endpoint)
        metadata = self.serve(engine, pool.layout.slabs())
        return PrefillOffer(self._endpoint.address, metadata, pool.layout.to_msgpack())

    def fill(self, tokens: int) -> None:
        """Makes the request."""
        self._table = block_table(self._pool.layout, tokens, SOURCE_SEED)
        fill(self._pool, self._table)
        self._pool.device.record().synchronize()

    def send(self, room: int, start: int, stop: int) -> float:
        """Offers a chunk; returns the time before it was offered. The last comes after a pause."""
        last = stop == self._table.num_tokens
        if last:
            time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        self._endpoint.send(room, self._table, tokens=range(start, stop), last=last)
        return began

    def end(self, room: int) -> None:
        """Forgets a room that has succeeded. Raises TransferError if it has failed."""
        if self._endpoint.wait(room, READER_TIMEOUT) is not KVPoll.Success:
            raise TransferError(str(self._endpoint.failure(room)))
        self._endpoint.forget(room)
