"""This process's side of hand-offs: a decode endpoint, and a bare engine that reads the same."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from disagg.cli.bench.handoff.prefill import SOURCE_SEED, PrefillOffer, TimedPrefill
from disagg.cli.bench.handoff.request import block_table, clear, need_request, pool_of
from disagg.cli.bench.peer import READER_TIMEOUT, OneOpen
from disagg.cli.bench.work import Work
from disagg.engines.base import TransferError, create_engine
from disagg.plan import plan
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint
from kvpool.device import Device
from kvpool.layout import PoolLayout
from kvpool.process import OtherProcess, Restarted

DEST_SEED = 2
ASK_SECONDS = 0.0005


class TimedHandOffs:
    """Endpoints of a prefill in another process and of a decode in this one, with pools of one
    model, and a bare engine on each side.
    """

    def __init__(
        self, other: OtherProcess, engine: str, family: str, *, tokens: int, device: str
    ) -> None:
        self._other, self._rooms, self._spent = other, 0, 0.0
        self._pool = pool = pool_of(family, tokens, device)
        with ExitStack() as stack:
            offer: PrefillOffer = other.call("open", engine, family, tokens)
            self._bare = create_engine(engine)
            stack.callback(self._bare.close)
            self._bare.register(pool.layout.slabs())
            self._peer = self._bare.connect(offer.metadata)
            self._decode = DecodeEndpoint(pool.layout, create_engine(engine))
            stack.callback(self._decode.close)
            self._decode.connect([offer.address], timeout=READER_TIMEOUT)
            self._source = PoolLayout.from_msgpack(offer.layout)
            self._plan = plan([self._source], pool.layout)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Closes endpoint and engine."""
        self._stack.close()

    def work(self, tokens: int, chunk: int) -> Work:
        """Hand-offs of `tokens` tokens in chunks of `chunk`, timed from the offer of the last chunk
        to Success; the reference reads the runs of that chunk. Raises TransferError.
        """
        self._other.call("fill", tokens)
        source = block_table(self._source, tokens, SOURCE_SEED)
        table = block_table(self._pool.layout, tokens, DEST_SEED)
        starts = range(0, tokens, chunk)
        last = range(starts[-1], tokens)
        batch = self._plan.bind(0, source, table, tokens=last)
        parts = list(batch.split(self._bare.max_bytes, self._bare.max_runs))
        clear(self._pool)

        def hand_over() -> None:
            room, self._rooms = self._rooms, self._rooms + 1
            self._decode.receive(room, table)
            for start in starts[:-1]:
                self._other.call("send", room, start, start + chunk)
            self._await_chunks(room, len(starts) - 1)
            self._other.post("send", room, last.start, last.stop)
            try:
                state = self._decode.wait(room, READER_TIMEOUT)
                ended = time.monotonic()
            finally:
                began: float = self._other.answer()
            if state is not KVPoll.Success:
                raise TransferError(str(self._decode.failure(room)))
            self._spent += ended - began
            self._decode.forget(room)
            self._other.call("end", room)

        def read() -> None:
            began = time.monotonic()
            for transfer in [self._bare.read(self._peer, part) for part in parts]:
                while not self._bare.poll(transfer):
                    if time.monotonic() - began > READER_TIMEOUT:
                        raise TransferError(f"no {batch.total} bytes in {READER_TIMEOUT:.0f} s.")
            self._spent += time.monotonic() - began

        def check() -> None:
            need_request(self._pool, table)
            clear(self._pool)
            read()
            need_request(self._pool, table, last.start)

        return Work(hand_over, read, check, lambda: self._spent)

    def _await_chunks(self, room: int, chunks: int) -> None:
        """Waits until so many chunks of a room were read."""
        ends = time.monotonic() + READER_TIMEOUT
        while True:
            progress = self._decode.metrics(room)
            if progress.chunks == chunks and progress.bytes_moved == progress.bytes_bound:
                return
            if time.monotonic() > ends or self._decode.poll(room) is KVPoll.Failed:
                raise TransferError(f"{progress.chunks} of {chunks} chunks were read.")
            time.sleep(ASK_SECONDS)


def timed_hand_offs(device: Device, tokens: int) -> OneOpen[TimedHandOffs]:
    """Hand-offs by engine and family, of requests of up to `tokens` tokens."""
    opened = partial(TimedHandOffs, tokens=tokens, device=device.name)
    return OneOpen(Restarted(TimedPrefill, device.name), opened)
