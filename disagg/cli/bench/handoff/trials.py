"""Hand-offs between two processes with memory on the device, by every engine: large runs, small
runs one by one, and small runs through staging buffers. Every byte of both pools is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from disagg.cli.bench.peer import READER_TIMEOUT, REFUSED
from disagg.engines.base import TransferError, create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import STAGING_BYTES, DecodeEndpoint
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from disagg.runtime.staging import staging_buffers
from disagg.testing import TransferSide
from kvpool.layout import PoolLayout
from kvpool.pools.base import KVPool
from kvpool.pools.typed import MHAPool, MLAPool
from kvpool.process import Restarted
from kvpool.render.text import human
from kvpool.testing.case import Inapplicable, fail

ROOM = "trial"


class TrialMove(NamedTuple):
    """A class of pools with its arguments, those in which decode differs, and a request's tokens,
    also where little is tried.
    """

    kind: type[KVPool]
    arguments: Mapping[str, Any]
    of_decode: Mapping[str, Any]
    tokens: int
    small_tokens: int
    staged: bool = False

    def side(self, name: str, tokens: int, device: str) -> TransferSide:
        """A side's pool with a request and pages to spare."""
        arguments = {**self.arguments, **(self.of_decode if name == "dest" else {})}
        pages = 3 + -(-tokens // arguments["page_size"])
        build: Any = self.kind
        return TransferSide(build(**arguments, num_pages=pages, device=device), tokens, name)


LATENTS = {
    "layers": range(8),
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bf16",
    "placement": "page",
    "page_size": 64,
}
HEADS = {
    "layers": range(4),
    "num_kv_heads": 8,
    "head_dim": 64,
    "dtype": "bf16",
    "page_size": 32,
    "order": "nhd",
}
# where the order of heads differs, each head of each token is a run: 128 bytes
ORDER = {"page_size": 16, "order": "hnd"}
MOVES = {
    "large runs": TrialMove(MLAPool, LATENTS, {}, 2000, 300),
    "small runs": TrialMove(MHAPool, HEADS, ORDER, 1000, 100),
    "small runs, staged": TrialMove(MHAPool, HEADS, ORDER, 1000, 100, staged=True),
}


def moved(prefill: Restarted, device: str, engine: str, name: str, small: bool) -> str:
    """Hands one request over from a `TrialPrefill`; what was moved, in words. Raises CheckFailure,
    and Inapplicable if the engine refuses the device's memory.
    """
    move, process = MOVES[name], prefill()
    tokens = move.small_tokens if small else move.tokens
    dest = move.side("dest", tokens, device)
    with closing(_decode(move, engine, dest.pool.layout)) as decode:
        address, refusal = process.call("open", engine, name, tokens)
        if refusal is not None:
            raise Inapplicable(f"not for this device: {refusal}")
        decode.connect([address], timeout=READER_TIMEOUT)
        decode.receive(ROOM, dest.address)
        process.call("send")
        if decode.wait(ROOM, READER_TIMEOUT) is not KVPoll.Success:
            fail(f"the hand-off failed: {decode.failure(ROOM)}")
        metrics = decode.metrics(ROOM)
    dest.check()
    process.call("check")
    way = " through staging buffers" if move.staged else ""
    runs = f"{metrics.runs:,} runs of {human(metrics.bytes_per_run)}{way}"
    return f"{human(metrics.bytes_moved)} in {runs}; every byte of both pools is right"


def _decode(move: TrialMove, name: str, layout: PoolLayout) -> DecodeEndpoint:
    """Decode's endpoint. Raises Inapplicable."""
    engine, staging = create_engine(name), STAGING_BYTES if move.staged else 0
    with ExitStack() as stack:
        stack.callback(engine.close)
        if move.staged and not engine.run_overhead_bytes:
            raise Inapplicable(f"engine {name} reads small runs as they are.")
        if move.staged and not staging_buffers(layout, engine, staging).slabs:
            raise Inapplicable("not for this device: it cannot scatter from staging buffers.")
        try:
            decode = DecodeEndpoint(layout, engine, staging=staging, verify="checksum")
        except REFUSED as error:
            raise Inapplicable(f"not for this device: {error}") from None
        stack.pop_all()
    return decode


class TrialPrefill:
    """Called by the other process: it prefills."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self._device = device
        self._endpoint: PrefillEndpoint | None = None

    def open(self, engine_name: str, move: str, tokens: int) -> tuple[str | None, str | None]:
        """Fills the pool of a hand-off. Returns its endpoint's address, or why it is refused."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self._side = MOVES[move].side("source", tokens, self._device)
        self._side.write()
        engine = create_engine(engine_name)
        try:
            self._endpoint = PrefillEndpoint(self._side.pool.layout, engine)
        except REFUSED as error:
            engine.close()
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
