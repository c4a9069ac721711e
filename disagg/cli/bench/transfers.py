"""Reads from another process's memory: bare, by engine and run length, and as hand-offs from the
offer of a request's last chunk to Success, by engine and family.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import wait

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, Measurement, Sizes, Work, need_equal, noise, plain_copy
from disagg.cli.bench.peer import (
    FAMILIES,
    HEADS_APART,
    READER_TIMEOUT,
    BenchContext,
    block_table,
    pool_of,
    random_pool,
    served,
    slab_of,
)
from disagg.engines.base import TransferError, create_engine
from disagg.plan import plan
from disagg.plan.bind import CopyBatch
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import STAGING_BYTES, DecodeEndpoint
from disagg.runtime.staging import staging_buffers
from kvpool.device import Device
from kvpool.layout import PoolLayout, RequestAddress, Slab
from kvpool.process import OtherProcess
from kvpool.testing.case import Inapplicable, fail
from kvpool.testing.memory import same_as_pool

READ_WIDTHS = {"1 KiB": 1 << 10, "4 KiB": 4 << 10, "36 KiB": 36 << 10, "1 MiB": 1 << 20}
BARE = "the bare engine"
WAIT_SECONDS, ASK_SECONDS = 0.1, 0.0005
SPARE_TOKENS = 100  # a trial's pools have pages for so many more than its request has


def transfer_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """Runs in random order, and one run of all bytes."""
    for engine in engines:
        for name, width in {**READ_WIDTHS, "one run": sizes.transfer_bytes}.items():
            count, case = sizes.transfer_bytes // width, f"{engine}, {name}"
            row = Measurement(group="transfer", case=case, engine=engine, bytes=count * width)
            opened = partial(open_transfer, engine, 2 * sizes.transfer_bytes, count, width)
            yield BenchCase(row=row, open=opened)


def open_transfer(
    engine: str, memory_bytes: int, count: int, width: int, context: BenchContext
) -> Work:
    """Half of the memory of each side is read and written."""
    opened: OpenMemory = context.opened(OpenMemory, engine, memory_bytes)
    memory, random = opened.memory, np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    nbytes = np.full(count, width, dtype=np.int64)
    batch = CopyBatch(opened.base + src, memory.data_ptr() + dst, nbytes)
    memory.zero_()
    context.device.record().synchronize()

    def check() -> None:
        slots = 2 * count * width
        runs = noise(memory.numel())[:slots].view(-1, width)
        expected = torch.zeros_like(runs)
        expected[torch.from_numpy(dst // width)] = runs[torch.from_numpy(src // width)]
        need_equal("runs of memory", memory[:slots].view(-1, width), expected)

    ours = partial(opened.read, batch, pause=True)
    return Work(ours, plain_copy(context.device, count * width), check)


class BareReader:
    """A bare engine over memory of this process, connected to that of the other process."""

    def __init__(self, engine: str, slabs: Sequence[Slab], metadata: bytes) -> None:
        with ExitStack() as stack:
            self._wake, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            for end in (self._wake, notify):
                stack.callback(os.close, end)
            self.engine = create_engine(engine)
            stack.callback(self.engine.close)
            self.engine.register(slabs)
            self._peer = self.engine.connect(metadata)
            self.engine.notify(notify)
            self.close = stack.pop_all().close

    def read(self, batch: CopyBatch, *, pause: bool) -> None:
        """Reads all of a batch, in parts as an endpoint does. With `pause`, the processor is left
        to threads that move the bytes. Raises TransferError.
        """
        pause = pause and self.engine.background
        parts = batch.split(self.engine.max_bytes, self.engine.max_runs)
        ends = time.monotonic() + READER_TIMEOUT
        for transfer in [self.engine.read(self._peer, part) for part in parts]:
            while not self.engine.poll(transfer):
                if time.monotonic() > ends:
                    raise TransferError(f"no {batch.total} bytes in {READER_TIMEOUT:.0f} s.")
                if pause and wait([self._wake], WAIT_SECONDS):
                    os.read(self._wake, 4096)


class OpenMemory(BareReader):
    """Of memory of this side, and of the peer's, which holds `noise` at pointer `base`."""

    def __init__(self, other: OtherProcess, device: Device, engine: str, nbytes: int) -> None:
        self.memory = device.allocate(nbytes)
        metadata, self.base = served(other, "serve_memory", engine, nbytes)
        super().__init__(engine, [slab_of(self.memory)], metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffSetup:
    """What both sides open: an engine, pools of a family for requests of up to `tokens` tokens, and
    the bytes of decode's staging buffers. A `checked` one compares digests, and needs the buffers.
    """

    engine: str
    family: str
    tokens: int
    staging: int = STAGING_BYTES
    checked: bool = False

    def case(self, name: str, tokens: int, chunk: int) -> BenchCase:
        """Hand-offs in chunks, beside reads of the last chunk's runs; their spare bytes count."""
        source = pool_of(self.family, self.tokens, "meta").layout
        dest = pool_of(self.family, self.tokens, "meta", decode=True).layout
        last = range((tokens - 1) // chunk * chunk, tokens)
        source_table = block_table(source, tokens)
        dest_table = block_table(dest, tokens, decode=True)
        nbytes = plan([source], dest).bind(0, source_table, dest_table, tokens=last).total

        def opened(context: BenchContext) -> Work:
            hand_offs: OpenHandOffs = context.opened(OpenHandOffs, self)
            return hand_offs.work(tokens, chunk)

        engine = self.engine
        row = Measurement(group="handoff", case=name, engine=engine, bytes=nbytes, bound=BARE)
        return BenchCase(row=row, open=opened, calls=1)

    def endpoint(self, layout: PoolLayout) -> DecodeEndpoint:
        """Decode's. Raises Inapplicable if it would not use the staging buffers to be checked."""
        engine, staging = create_engine(self.engine), self.staging
        if self.checked and staging and not staging_buffers(layout, engine, staging).slabs:
            engine.close()
            raise Inapplicable(f"engine {self.engine} uses no staging buffers for this memory.")
        return DecodeEndpoint(
            layout, engine, staging=staging, verify="checksum" if self.checked else None
        )


def handoff_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """From the offer of a request's last chunk to Success on decode, for each family."""
    most = max(sizes.handoff_tokens)
    for engine, family, tokens in product(engines, FAMILIES, sizes.handoff_tokens):
        for chunk in sorted({tokens, min(tokens, sizes.handoff_chunk)}, reverse=True):
            name = f"{engine}, {family}, {tokens:,} token{'s' * (tokens > 1)}"
            name += f" in chunks of {chunk:,}" if chunk < tokens else ""
            setup = HandOffSetup(engine=engine, family=family, tokens=most)
            yield setup.case(name, tokens, chunk)


def trial_cases(engine: str, tokens: int) -> Iterator[BenchCase]:
    """Hand-offs to be checked and not timed; of small runs, also through staging buffers."""
    most = tokens + SPARE_TOKENS
    for runs, family, size in (
        ("large runs", "MLA", 0),
        ("small runs", HEADS_APART, 0),
        ("small runs, staged", HEADS_APART, STAGING_BYTES),
    ):
        setup = HandOffSetup(engine=engine, family=family, tokens=most, staging=size, checked=True)
        yield setup.case(f"{engine}, {runs}", tokens, tokens)


class OpenHandOffs:
    """A prefill in another process and a decode in this one, and a bare engine on each side."""

    def __init__(self, other: OtherProcess, device: Device, setup: HandOffSetup) -> None:
        name, family, tokens = setup.engine, setup.family, setup.tokens
        self._other, self._rooms, self._spent = other, 0, 0.0
        self._pool = pool = pool_of(family, tokens, device.name, decode=True)
        self._truth = random_pool(family, tokens, device.name)
        with ExitStack() as stack:
            metadata, address, layout = served(other, "serve_pool", name, family, tokens)
            self._decode = stack.enter_context(setup.endpoint(pool.layout))
            self._reader = BareReader(name, pool.layout.slabs(), metadata)
            stack.callback(self._reader.close)
            self._decode.connect([address], timeout=READER_TIMEOUT)
            self._plan = plan([PoolLayout.from_msgpack(layout)], pool.layout)
            self.close = stack.pop_all().close

    def work(self, tokens: int, chunk: int) -> Work:
        """Hand-offs, timed from the offer of the last chunk to Success, and reads of its runs."""
        source = block_table(self._truth.layout, tokens)
        table = block_table(self._pool.layout, tokens, decode=True)
        starts = range(0, tokens, chunk)
        batch = self._plan.bind(0, source, table, tokens=range(starts[-1], tokens))
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
            self._reader.read(batch, pause=False)
            self._spent += time.monotonic() - began

        def check() -> None:
            self._need_request(source, table)
            self._clear()
            read()
            self._need_request(source, table, starts[-1])

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

    def _need_request(self, source: RequestAddress, table: RequestAddress, start: int = 0) -> None:
        """Raises CheckFailure unless a request's positions from `start` on are the source's, where
        both block tables say, and other items are as they were: zeros.
        """
        count = same_as_pool(self._pool, table, self._truth, source, start)
        if count.wrong:
            fail(f"{count.wrong:,} of {count.checked:,} bytes differ.")
        for buffer in self._pool.layout.buffers:
            items = self._pool.item_bytes_view(buffer).clone()
            space = self._pool.layout.space_by_name[buffer.space]
            items[torch.tensor(table.spans[space.id_list].ids)] = 0
            if items.any():
                fail(f"buffer {buffer.name}: items of no request were written.")
