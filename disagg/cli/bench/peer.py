"""Another process of a benchmark, whose memory is read, and what this one has connected to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from disagg.cli.bench.case import UNABLE, noise
from disagg.engines.base import Engine, EngineUnavailable, TransferError, create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.device import Device, get_device
from kvpool.layout import PoolLayout, RequestAddress, Slab, Span
from kvpool.layout.formats import Shard
from kvpool.models import declare
from kvpool.pools.base import KVPool
from kvpool.pools.typed import MHAPool
from kvpool.process import OtherProcess
from kvpool.testing.case import Inapplicable
from kvpool.testing.checks.layout import usable_items

READER_TIMEOUT = 60.0  # seconds to wait for a read or a hand-off
# before the last chunk, so that both endpoints wait for it, as they do where it is computed
SETTLE_SECONDS = 0.003
REFUSED = (EngineUnavailable, TransferError, *UNABLE)
"""What an engine or an endpoint raises that cannot have this device's memory."""
FAMILIES = {
    # a shipped config, its packing, and of how many ranks a pool is of the first
    "MHA": ("llama_3_1_70b", "bf16", 4),
    "MLA": ("deepseek_v3", "bf16", 1),
    "NSA": ("deepseek_v32", "fp8", 1),
    "SWA": ("gpt_oss_120b", "bf16", 1),
    "HybridLinear": ("qwen3_next_80b", "bf16", 1),
    "DSv4": ("deepseek_v4", "fp8", 1),
}
HEADS_APART = "heads apart"  # no family: each head of each token is a run of 128 bytes
FEW_LAYERS = range(8)  # of a model, in the pools of its hand-offs


class BenchContext:
    """A device, and another process with memory like it, which starts when a case needs it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._other, self._stack = OtherProcess(BenchPeer, device.name), ExitStack()
        self._key: tuple[object, ...] = ()
        self._opened: Any = None

    def opened(self, kind: Callable[..., Any], *key: Any) -> Any:
        """`kind(other process, device, *key)`, open until another is; Inapplicable if refused."""
        if self._key != (kind, *key) or not self._other.alive:
            self._stack.close()
            self._key, self._opened = (), None
            try:
                self._opened = kind(self._other.revived(), self.device, *key)
                self._stack.callback(self._opened.close)
            except REFUSED as error:
                self._opened = Inapplicable(str(error))
            self._key = kind, *key
        if isinstance(self._opened, Inapplicable):
            raise self._opened
        return self._opened

    def close(self) -> None:
        """Closes what is open, and ends the process."""
        self._stack.close()
        self._other.close()


def served(peer: OtherProcess, method: str, *arguments: Any) -> Any:
    """What a method of the peer returns. Raises Inapplicable if it refuses."""
    answer, refusal = peer.call("refusable", method, *arguments)
    if refusal is not None:
        raise Inapplicable(refusal)
    return answer


class BenchPeer:
    """The other process: serves memory by one bare engine at a time, and hands requests over."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self.device, self._stack = get_device(device), ExitStack()
        self._bare: Engine | None = None

    @property
    def progress_seconds(self) -> float | None:
        """How often the bare engine is to make progress."""
        return None if self._bare is None else self._bare.progress_seconds

    def progress(self) -> None:
        """Lets reads proceed."""
        if self._bare is not None:
            self._bare.progress()

    def refusable(self, method: str, *arguments: Any) -> tuple[Any, str | None]:
        """What a method returns, or why an engine refuses; in place of what was served before."""
        self._bare = None
        self._stack.close()
        try:
            return getattr(self, method)(*arguments), None
        except REFUSED as error:
            return None, str(error)

    def serve_memory(self, engine: str, nbytes: int) -> tuple[bytes, int]:
        """Metadata of an engine over memory that holds `noise`, and its pointer."""
        self._memory = self.device.allocate(nbytes)
        self._memory.copy_(noise(nbytes))
        self.device.record().synchronize()
        return self._serve(engine, [slab_of(self._memory)]), self._memory.data_ptr()

    def serve_pool(self, engine: str, family: str, tokens: int) -> tuple[bytes, str, bytes]:
        """Metadata of an engine over a pool with random bytes for requests of up to `tokens`
        tokens, the address of an endpoint over the same pool, and its layout.
        """
        self._pool = pool = random_pool(family, tokens, self.device.name)
        with ExitStack() as unless_open:
            created = create_engine(engine)
            unless_open.callback(created.close)
            self._endpoint = self._stack.enter_context(PrefillEndpoint(pool.layout, created))
            unless_open.pop_all()
        metadata = self._serve(engine, pool.layout.slabs())
        return metadata, self._endpoint.address, pool.layout.to_msgpack()

    def _serve(self, engine: str, slabs: Sequence[Slab]) -> bytes:
        self._bare = create_engine(engine)
        self._stack.callback(self._bare.close)  # before its memory goes
        self._bare.register(slabs)
        return self._bare.metadata()

    def send(self, room: int, tokens: int, start: int, stop: int) -> float:
        """Offers a chunk, the last after a pause; returns the time before it was offered."""
        table = block_table(self._pool.layout, tokens)
        if stop == tokens:
            time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        self._endpoint.send(room, table, tokens=range(start, stop), last=stop == tokens)
        return began

    def end(self, room: int) -> None:
        """Forgets a room that has succeeded. Raises TransferError if it has failed."""
        if self._endpoint.wait(room, READER_TIMEOUT) is not KVPoll.Success:
            raise TransferError(str(self._endpoint.failure(room)))
        self._endpoint.forget(room)


def slab_of(memory: torch.Tensor) -> Slab:
    """A tensor of bytes as memory to register."""
    return Slab(memory.data_ptr(), memory.numel(), str(memory.device))


def pool_of(family: str, tokens: int, device: str, *, decode: bool = False) -> KVPool:
    """A side's pool of the first layers of a family's model, for one request of `tokens` tokens."""
    if family == HEADS_APART:
        page_size = 16 if decode else 32
        return MHAPool(
            layers=range(4),
            num_kv_heads=8,
            head_dim=64,
            dtype="bf16",
            order="hnd" if decode else "nhd",
            page_size=page_size,
            num_pages=1 + -(-tokens // page_size),
            device=device,
        )
    config, packing, ranks = FAMILIES[family]
    model = declare(config)
    pages, shard = 1 + -(-tokens // model.page_size), Shard(0, ranks)
    return model.build(
        layers=FEW_LAYERS, packing=packing, num_pages=pages, requests=1, shard=shard, device=device
    )


def random_pool(family: str, tokens: int, device: str) -> KVPool:
    """Prefill's with random bytes, equal in every process."""
    pool = pool_of(family, tokens, device)
    for number, buffer in enumerate(pool.layout.buffers):
        view = pool.item_bytes_view(buffer)
        view.copy_(noise(*view.shape, seed=number))
    pool.device.record().synchronize()
    return pool


def block_table(layout: PoolLayout, tokens: int, *, decode: bool = False) -> RequestAddress:
    """A request's items in an order of each side's own, equal in every process."""
    random, spans = np.random.default_rng(2 if decode else 1), {}
    for name, ids in usable_items(layout).items():
        alive = layout.space_by_name[name].alive_items(tokens)
        spans[name] = Span(random.permutation(ids)[: len(alive)], alive.start)
    return RequestAddress(tokens, spans)
