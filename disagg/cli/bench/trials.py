"""Hand-offs between two processes with memory on the device, by every engine: large runs, small
runs one by one, and small runs through staging buffers. Every byte of both pools is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from disagg.cli.bench.peer import READER_TIMEOUT, REFUSED, BenchPeer
from disagg.engines.base import create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import STAGING_BYTES, DecodeEndpoint
from disagg.runtime.staging import staging_buffers
from disagg.testing import TransferSide
from kvpool.layout import PoolLayout
from kvpool.pools.base import KVPool
from kvpool.pools.typed import MHAPool, MLAPool
from kvpool.process import OtherProcess
from kvpool.render.text import human
from kvpool.testing.case import Inapplicable, fail

ROOM = "trial"
COMMON = {"dtype": "bf16", "layers": range(4)}
LATENTS = {**COMMON, "layers": range(8), "placement": "page", "page_size": 64}
HEADS = {**COMMON, "num_kv_heads": 8, "head_dim": 64, "page_size": 32, "order": "nhd"}
# where the order of heads differs, each head of each token is a run: 128 bytes
ORDER = {"page_size": 16, "order": "hnd"}


class TrialMove(NamedTuple):
    """A class of pools with its arguments, those in which decode differs, and a request's tokens:
    usually, and where little is tried.
    """

    kind: type[KVPool]
    arguments: Mapping[str, Any]
    of_decode: Mapping[str, Any]
    tokens: tuple[int, int]


MOVES = {
    "large runs": TrialMove(MLAPool, LATENTS, {}, (2000, 300)),
    "small runs": TrialMove(MHAPool, HEADS, ORDER, (1000, 100)),
    "small runs, staged": TrialMove(MHAPool, HEADS, ORDER, (1000, 100)),
}


def moved(prefill: OtherProcess, device: str, engine: str, move: str, small: bool) -> str:
    """Hands one request over from a `TrialPrefill`; what was moved, in words. Raises CheckFailure,
    and Inapplicable if the engine refuses the device's memory.
    """
    process, staged = prefill.revived(), "staged" in move
    tokens = MOVES[move].tokens[small]
    dest = side_of(move, "dest", tokens, device)
    with closing(_decode(dest.layout, engine, staged)) as decode:
        address, refusal = process.call("open", engine, move, tokens)
        if refusal is not None:
            raise Inapplicable(f"not for this device: {refusal}")
        decode.connect([address], timeout=READER_TIMEOUT)
        decode.receive(ROOM, dest.address)
        process.call("send_all")
        if decode.wait(ROOM, READER_TIMEOUT) is not KVPoll.Success:
            fail(f"the hand-off failed: {decode.failure(ROOM)}")
        metrics = decode.metrics(ROOM)
    dest.check()
    process.call("check")
    way = " through staging buffers" if staged else ""
    runs = f"{metrics.runs:,} runs of {human(metrics.bytes_per_run)}{way}"
    return f"{human(metrics.bytes_moved)} in {runs}; every byte of both pools is right"


def side_of(move: str, name: str, tokens: int, device: str) -> TransferSide:
    """A side's pool with a request, and pages to spare."""
    kind, arguments, of_decode, _ = MOVES[move]
    arguments = {**arguments, **(of_decode if name == "dest" else {}), "device": device}
    build: Any = kind
    pool = build(**arguments, num_pages=3 + -(-tokens // arguments["page_size"]))
    return TransferSide(pool, tokens, name)


def _decode(layout: PoolLayout, name: str, staged: bool) -> DecodeEndpoint:
    """Decode's endpoint. Raises Inapplicable."""
    engine, staging = create_engine(name), STAGING_BYTES if staged else 0
    with ExitStack() as unless_open:
        unless_open.callback(engine.close)
        if staged and not engine.run_overhead_bytes:
            raise Inapplicable(f"engine {name} reads small runs as they are.")
        if staged and not staging_buffers(layout, engine, staging).slabs:
            raise Inapplicable("not for this device: it cannot scatter from staging buffers.")
        try:
            decode = DecodeEndpoint(layout, engine, staging=staging, verify="checksum")
        except REFUSED as error:
            raise Inapplicable(f"not for this device: {error}") from None
        unless_open.pop_all()
    return decode


class TrialPrefill(BenchPeer):
    """Called by the other process: it prefills."""

    def open(self, engine: str, move: str, tokens: int) -> tuple[str | None, str | None]:
        """Fills the pool of a hand-off. Returns its endpoint's address, or why it is refused."""
        self.stop()
        self._side = side_of(move, "source", tokens, self.device.name)
        self._side.write()
        try:
            return self.open_endpoint(self._side.layout, engine), None
        except REFUSED as error:
            return None, str(error)

    def send_all(self) -> None:
        """Offers the request."""
        self._endpoint.send(ROOM, self._side.address)

    def check(self) -> None:
        """Raises CheckFailure if a byte of the pool has changed."""
        self._side.memory.check()
