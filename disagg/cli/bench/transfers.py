"""Reads from another process's memory: bare, by engine and run length, and as hand-offs from the
offer of a request's last chunk to Success, by engine and family.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, Sizes, Work, WrongBytes, need_equal, noise, plain_copy
from disagg.cli.bench.peer import (
    DEST_SEED,
    FAMILIES,
    READER_TIMEOUT,
    SOURCE_SEED,
    BenchContext,
    block_table,
    pool_of,
    random_pool,
    slab_of,
)
from disagg.cli.demo.check import same_as_pool
from disagg.engines.base import TransferError, create_engine
from disagg.plan import plan
from disagg.plan.bind import CopyBatch
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint
from kvpool.device import Device
from kvpool.layout import PoolLayout
from kvpool.process import OtherProcess

READ_WIDTHS = {"1 KiB": 1 << 10, "4 KiB": 4 << 10, "36 KiB": 36 << 10, "1 MiB": 1 << 20}
BARE = "the bare engine"
WAIT_SECONDS, ASK_SECONDS = 0.1, 0.0005


def transfer_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """Runs in random order, and one run of all bytes."""
    for engine in engines:
        for name, width in {**READ_WIDTHS, "one run": sizes.transfer_bytes}.items():
            count = sizes.transfer_bytes // width
            yield BenchCase(
                group="transfer",
                name=f"{engine}, {name}",
                nbytes=count * width,
                open=partial(open_transfer, engine, 2 * sizes.transfer_bytes, count, width),
                engine=engine,
            )


def open_transfer(
    engine: str, memory_bytes: int, count: int, width: int, context: BenchContext
) -> Work:
    """Half of the memory of each side is read and written."""
    reader: PeerReader = context.opened(PeerReader, engine, memory_bytes)
    memory, random = reader.memory, np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    nbytes = np.full(count, width, dtype=np.int64)
    batch = CopyBatch(reader.base + src, memory.data_ptr() + dst, nbytes)
    memory.zero_()
    context.device.record().synchronize()

    def check() -> None:
        slots = 2 * count * width
        runs = noise(memory.numel())[:slots].view(-1, width)
        expected = torch.zeros_like(runs)
        expected[torch.from_numpy(dst // width)] = runs[torch.from_numpy(src // width)]
        need_equal("runs of memory", memory[:slots].view(-1, width), expected)

    return Work(partial(reader.read, batch), plain_copy(context.device, count * width), check)


class PeerReader:
    """An engine connected to the same engine in the other process.

    `memory` is this side's; the peer's, at pointer `base`, holds `noise`.
    """

    def __init__(self, other: OtherProcess, device: Device, engine: str, nbytes: int) -> None:
        self.memory = device.allocate(nbytes)
        with ExitStack() as stack:
            metadata, self.base = other.call("serve_memory", engine, nbytes)
            self._wake, notify = os.pipe()
            for end in (self._wake, notify):
                os.set_blocking(end, False)
                stack.callback(os.close, end)
            self.engine = create_engine(engine)
            stack.callback(self.engine.close)
            self.engine.register([slab_of(self.memory)])
            self._peer = self.engine.connect(metadata)
            self.engine.notify(notify)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Closes the engine."""
        self._stack.close()

    def read(self, batch: CopyBatch) -> None:
        """Reads all of a batch, in parts as an endpoint does. Raises TransferError."""
        for part in batch.split(self.engine.max_bytes, self.engine.max_runs):
            transfer = self.engine.read(self._peer, part)
            ends = time.monotonic() + READER_TIMEOUT
            while not self.engine.poll(transfer):
                if time.monotonic() > ends:
                    raise TransferError(f"no {part.total} bytes in {READER_TIMEOUT:.0f} s.")
                # the processor is for the threads that move the bytes
                if self.engine.background and select.select([self._wake], [], [], WAIT_SECONDS)[0]:
                    os.read(self._wake, 4096)


def handoff_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """From the offer of a request's last chunk to Success on decode, in another process, for each
    family; the reference reads that chunk's runs, and bytes are theirs, with spare bytes in them.
    """
    most = max(sizes.handoff_tokens)
    for engine, family in product(engines, FAMILIES):
        layout = pool_of(family, most, "meta").layout
        moves = plan([layout], layout)
        for tokens in sizes.handoff_tokens:
            table = block_table(layout, tokens, DEST_SEED)
            for chunk in sorted({tokens, min(tokens, sizes.handoff_chunk)}, reverse=True):
                name = f"{engine}, {family}, {tokens:,} token{'s' * (tokens > 1)}"
                name += f" in chunks of {chunk:,}" if chunk < tokens else ""
                last = range((tokens - 1) // chunk * chunk, tokens)
                yield BenchCase(
                    group="handoff",
                    name=name,
                    nbytes=moves.bind(0, table, table, tokens=last).total,
                    open=partial(
                        open_handoff,
                        engine=engine,
                        family=family,
                        most=most,
                        tokens=tokens,
                        chunk=chunk,
                    ),
                    bound=BARE,
                    calls=1,
                    engine=engine,
                )


def open_handoff(
    context: BenchContext, *, engine: str, family: str, most: int, tokens: int, chunk: int
) -> Work:
    """See handoff_cases; the pools have room for `most` tokens."""
    hand_offs: TimedHandOffs = context.opened(TimedHandOffs, engine, family, most)
    return hand_offs.work(tokens, chunk)


class TimedHandOffs:
    """Endpoints of a prefill in another process and of a decode in this one, with pools of one
    model, and a bare engine on each side.
    """

    def __init__(
        self, other: OtherProcess, device: Device, engine: str, family: str, tokens: int
    ) -> None:
        self._other, self._rooms, self._spent = other, 0, 0.0
        self._pool = pool = pool_of(family, tokens, device.name)
        self._truth = random_pool(family, tokens, device.name)
        with ExitStack() as stack:
            metadata, address, layout = other.call("serve_pool", engine, family, tokens)
            self._bare = create_engine(engine)
            stack.callback(self._bare.close)
            self._bare.register(pool.layout.slabs())
            self._peer = self._bare.connect(metadata)
            self._decode = DecodeEndpoint(pool.layout, create_engine(engine))
            stack.callback(self._decode.close)
            self._decode.connect([address], timeout=READER_TIMEOUT)
            self._plan = plan([PoolLayout.from_msgpack(layout)], pool.layout)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Closes endpoint and engine."""
        self._stack.close()

    def work(self, tokens: int, chunk: int) -> Work:
        """Hand-offs of `tokens` tokens in chunks of `chunk`, timed from the offer of the last chunk
        to Success; the reference reads the runs of that chunk. Raises TransferError.
        """
        source = block_table(self._pool.layout, tokens, SOURCE_SEED)
        table = block_table(self._pool.layout, tokens, DEST_SEED)
        starts = range(0, tokens, chunk)
        batch = self._plan.bind(0, source, table, tokens=range(starts[-1], tokens))
        parts = list(batch.split(self._bare.max_bytes, self._bare.max_runs))
        self._clear()

        def hand_over() -> None:
            room, self._rooms = self._rooms, self._rooms + 1
            self._decode.receive(room, table)
            for start in starts[:-1]:
                self._other.call("send", room, tokens, start, start + chunk)
            self._await_chunks(room, len(starts) - 1)
            self._other.post("send", room, tokens, starts[-1], tokens)
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
            self._need_request(tokens)
            self._clear()
            read()
            self._need_request(tokens, starts[-1])

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

    def _clear(self) -> None:
        for buffer in self._pool.layout.buffers:
            self._pool.item_bytes_view(buffer).zero_()

    def _need_request(self, tokens: int, start: int = 0) -> None:
        """Raises WrongBytes unless a request's positions from `start` on are the source's. They are
        compared without a plan: where they lie follows from both block tables.
        """
        table, source = (
            block_table(self._pool.layout, tokens, s) for s in (DEST_SEED, SOURCE_SEED)
        )
        count = same_as_pool(self._pool, table, self._truth, source, start)
        if count.wrong:
            raise WrongBytes(f"{count.wrong:,} of {count.checked:,} bytes differ.")
