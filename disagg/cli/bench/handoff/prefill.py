"""The peer process of hand-offs: a prefill endpoint, and a bare engine over the same memory."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from disagg.cli.bench.handoff.request import block_table, fill, pool_of
from disagg.cli.bench.peer import READER_TIMEOUT, REFUSED
from disagg.engines.base import Engine, TransferError, create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.layout import RequestAddress
from kvpool.pools.base import KVPool

SETTLE_SECONDS = 0.003
"""Before the last chunk, so that both endpoints wait for it, as they do where it is computed."""
SOURCE_SEED = 1


class Prefill(NamedTuple):
    """What decode needs to know: the endpoint's address, the bare engine's metadata, the layout."""

    address: str
    metadata: bytes
    layout: bytes


class PrefillSide:
    """Answers calls of the other process. One model, engine and request at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool: KVPool | None = None
        self._endpoint: PrefillEndpoint | None = None
        self._bare: Engine | None = None
        self._table = RequestAddress(0, {})

    @property
    def progress_seconds(self) -> float | None:
        """How often the bare engine is to make progress."""
        return None if self._bare is None else self._bare.progress_seconds

    def progress(self) -> None:
        """Lets reads of the bare engine proceed."""
        if self._bare is not None:
            self._bare.progress()

    def open(self, engine: str, family: str, tokens: int) -> Prefill:
        """Serves a pool for requests of up to `tokens` tokens."""
        self.close()
        self._pool = pool = pool_of(family, tokens, self._device)
        self._endpoint = PrefillEndpoint(pool.layout, create_engine(engine))
        self._bare = create_engine(engine)
        self._bare.register(pool.layout.slabs())
        return Prefill(self._endpoint.address, self._bare.metadata(), pool.layout.to_msgpack())

    def fill(self, tokens: int) -> None:
        """Makes the request."""
        assert self._pool is not None
        self._table = block_table(self._pool.layout, tokens, SOURCE_SEED)
        fill(self._pool, self._table)
        self._pool.device.record().synchronize()

    def send(self, room: int, start: int, stop: int) -> float:
        """Offers a chunk; returns the time before it was offered. The last comes after a pause."""
        assert self._endpoint is not None
        last = stop == self._table.num_tokens
        if last:
            time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        self._endpoint.send(room, self._table, tokens=range(start, stop), last=last)
        return began

    def end(self, room: int) -> None:
        """Forgets a room that has succeeded. Raises TransferError if it has failed."""
        assert self._endpoint is not None
        if self._endpoint.wait(room, READER_TIMEOUT) is not KVPoll.Success:
            raise TransferError(str(self._endpoint.failure(room)))
        self._endpoint.forget(room)

    def close(self) -> None:
        """Serves nothing any more."""
        if self._bare is not None:
            self._bare.close()
            self._bare = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def serve(pipe: Connection, device: str) -> None:
    """The peer process: answers calls `(name, arguments)` until the pipe is closed; errors are sent
    as str.
    """
    torch.set_num_threads(1)
    side = PrefillSide(device)
    try:
        while True:
            while not pipe.poll(side.progress_seconds):
                side.progress()
            name, arguments = pipe.recv()
            try:
                pipe.send(getattr(side, name)(*arguments))
            except REFUSED as error:
                pipe.send(str(error))
    except (EOFError, KeyboardInterrupt):
        side.close()
