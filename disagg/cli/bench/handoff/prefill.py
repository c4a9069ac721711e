"""The peer process of hand-offs: a prefill endpoint, and a bare engine over the same memory."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from disagg.cli.bench.handoff.request import block_table, fill, pool_of
from disagg.cli.bench.peer import READER_TIMEOUT
from disagg.engines.base import Engine, TransferError, create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.layout import RequestAddress
from kvpool.pools.base import KVPool

SETTLE_SECONDS = 0.003
"""Before the last chunk, so that both endpoints wait for it, as they do where it is computed."""
SOURCE_SEED = 1


class PrefillOffer(NamedTuple):
    """What decode needs to know: the endpoint's address, the bare engine's metadata, the layout."""

    address: str
    metadata: bytes
    layout: bytes


class Served(NamedTuple):
    """A pool, and what serves it."""

    pool: KVPool
    endpoint: PrefillEndpoint
    bare: Engine


class TimedPrefill:
    """Called by the other process. One model, engine and request at a time."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self._device = device
        self._open: Served | None = None
        self._table = RequestAddress(0, {})

    @property
    def progress_seconds(self) -> float | None:
        """How often the bare engine is to make progress."""
        return None if self._open is None else self._open.bare.progress_seconds

    def progress(self) -> None:
        """Lets reads of the bare engine proceed."""
        self._served.bare.progress()

    def open(self, engine: str, family: str, tokens: int) -> PrefillOffer:
        """Serves a pool for requests of up to `tokens` tokens."""
        if self._open is not None:
            self._open.bare.close()
            self._open.endpoint.close()
            self._open = None
        pool = pool_of(family, tokens, self._device)
        endpoint, bare = PrefillEndpoint(pool.layout, create_engine(engine)), create_engine(engine)
        self._open = Served(pool, endpoint, bare)
        bare.register(pool.layout.slabs())
        return PrefillOffer(endpoint.address, bare.metadata(), pool.layout.to_msgpack())

    def fill(self, tokens: int) -> None:
        """Makes the request."""
        pool = self._served.pool
        self._table = block_table(pool.layout, tokens, SOURCE_SEED)
        fill(pool, self._table)
        pool.device.record().synchronize()

    def send(self, room: int, start: int, stop: int) -> float:
        """Offers a chunk; returns the time before it was offered. The last comes after a pause."""
        endpoint, last = self._served.endpoint, stop == self._table.num_tokens
        if last:
            time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        endpoint.send(room, self._table, tokens=range(start, stop), last=last)
        return began

    def end(self, room: int) -> None:
        """Forgets a room that has succeeded. Raises TransferError if it has failed."""
        endpoint = self._served.endpoint
        if endpoint.wait(room, READER_TIMEOUT) is not KVPoll.Success:
            raise TransferError(str(endpoint.failure(room)))
        endpoint.forget(room)

    @property
    def _served(self) -> Served:
        if self._open is None:
            raise TransferError("no pool is served yet: `open` comes first.")
        return self._open
