"""Hand-offs between two processes with memory on the device, by every engine: large runs, small
runs one by one, and small runs through staging buffers. Every byte of both pools is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from disagg.cli.accept.report import NOT_HERE, Row
from disagg.cli.accept.scope import NotHere, Scope, Wrong
from disagg.cli.bench.peer import READER_TIMEOUT, REFUSED, OtherProcess
from disagg.engines.base import TransferError, create_engine, engine_class, engine_names
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import STAGING_BYTES, DecodeEndpoint
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from disagg.runtime.staging import staging_buffers
from disagg.testing import TransferSide
from kvpool.layout import PoolLayout
from kvpool.pools.base import KVPool
from kvpool.pools.mha import MHAPool
from kvpool.pools.mla import MLAPool
from kvpool.render.text import human

ROOM = "accept"


class HandOff(NamedTuple):
    """A class of pools, and the arguments of prefill's and of decode's."""

    name: str
    kind: type[KVPool]
    common: Mapping[str, Any]
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]
    tokens: int
    small_tokens: int
    staged: bool = False

    def pool(self, side: Mapping[str, Any], tokens: int, device: str) -> KVPool:
        """A side's pool, for a request of some tokens and with pages to spare."""
        build: Any = self.kind
        pages = 3 + -(-tokens // side["page_size"])
        made: KVPool = build(**{**self.common, **side}, num_pages=pages, device=device)
        return made


HEADS = {"layers": range(4), "num_kv_heads": 8, "head_dim": 64, "dtype": "bf16"}
LATENTS = {
    "layers": range(8),
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bf16",
    "placement": "page",
}
# where the order of heads differs, each head of each token is a run: 128 bytes
ORDERS = {"page_size": 32, "order": "nhd"}, {"page_size": 16, "order": "hnd"}
HAND_OFFS = (
    HandOff("large runs", MLAPool, LATENTS, {"page_size": 64}, {"page_size": 64}, 2000, 300),
    HandOff("small runs", MHAPool, HEADS, *ORDERS, 1000, 100),
    HandOff("small runs, staged", MHAPool, HEADS, *ORDERS, 1000, 100, staged=True),
)


def engine_rows(scope: Scope) -> list[Row]:
    """A row for each engine that does not work here, and for each hand-off of the others."""
    rows = []
    with closing(_Other(scope.device.name)) as other:
        for name in engine_names():
            reason = engine_class(name).availability()
            if reason is not None:
                rows.append(Row(name, NOT_HERE, reason))
                continue
            rows += [
                scope.tried(f"{name}, {each.name}", partial(_handed_over, scope, other, name, each))
                for each in HAND_OFFS
            ]
    return rows


def _handed_over(scope: Scope, other: _Other, engine: str, case: HandOff) -> str:
    """Hands one request over. Raises NotHere where the engine refuses the device's memory."""
    tokens = case.small_tokens if scope.small else case.tokens
    dest = TransferSide(case.pool(case.decode, tokens, scope.device.name), tokens, "dest")
    with closing(_decode(case, engine, dest.pool.layout)) as decode:
        address, refusal = other.process.call("open", engine, HAND_OFFS.index(case), tokens)
        if refusal is not None:
            raise NotHere(f"not for this device: {refusal}")
        decode.connect([address], timeout=READER_TIMEOUT)
        decode.receive(ROOM, dest.address)
        other.process.call("send")
        if decode.wait(ROOM, READER_TIMEOUT) is not KVPoll.Success:
            raise Wrong(f"the hand-off failed: {decode.failure(ROOM)}")
        found = decode.metrics(ROOM)
    dest.check()
    other.process.call("check")
    way = " through staging buffers" if case.staged else ""
    runs = f"{found.runs:,} runs of {human(found.bytes_per_run)}{way}"
    return f"{human(found.bytes_moved)} in {runs}; every byte of both pools is right"


def _decode(case: HandOff, engine: str, layout: PoolLayout) -> DecodeEndpoint:
    """Decode's endpoint. Raises NotHere."""
    made, staging = create_engine(engine), STAGING_BYTES if case.staged else 0
    with ExitStack() as stack:
        stack.callback(made.close)
        if case.staged and not made.run_overhead_bytes:
            raise NotHere(f"engine {engine} reads small runs as they are.")
        if case.staged and not staging_buffers(layout, made, staging).slabs:
            raise NotHere("not for this device: it cannot scatter from staging buffers.")
        try:
            decode = DecodeEndpoint(layout, made, staging=staging, verify="checksum")
        except REFUSED as error:
            raise NotHere(f"not for this device: {error}") from None
        stack.pop_all()
    return decode


class _Other:
    """The process that prefills, and another after it has ended."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._running: OtherProcess | None = None

    @property
    def process(self) -> OtherProcess:
        """The process."""
        if self._running is None or not self._running.process.is_alive():
            self._running = OtherProcess(_serve, self._device)
        return self._running

    def close(self) -> None:
        """Ends it."""
        if self._running is not None:
            self._running.close()


class _Prefill:
    """What the other process does when it is called."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._endpoint: PrefillEndpoint | None = None

    def open(self, engine: str, number: int, tokens: int) -> tuple[str | None, str | None]:
        """Fills the pool of a hand-off. Returns its endpoint address, or why it is refused."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        case = HAND_OFFS[number]
        self._side = TransferSide(case.pool(case.prefill, tokens, self._device), tokens, "source")
        self._side.write()
        made = create_engine(engine)
        try:
            self._endpoint = PrefillEndpoint(self._side.pool.layout, made)
        except REFUSED as error:
            made.close()
            return None, str(error)
        return self._endpoint.address, None

    def send(self) -> None:
        """Offers the request."""
        if self._endpoint is None:
            raise TransferError("nothing is served: `open` was refused, or has not been called.")
        self._endpoint.send(ROOM, self._side.address)

    def check(self) -> None:
        """Raises CheckFailure if a byte of the pool has changed."""
        self._side.memory.check(self._side.bytes)


def _serve(pipe: Connection, device: str) -> None:
    """The other process: answers calls until the pipe is closed; errors are sent as str."""
    torch.set_num_threads(1)
    side = _Prefill(device)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send(getattr(side, name)(*arguments))
            except Exception as error:  # it is told, and the next is tried
                pipe.send(f"{type(error).__name__}: {error}")
