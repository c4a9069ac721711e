"""Reads through Mooncake's transfer engine, over TCP or RDMA.

Anyone who can reach a process's Mooncake ports can read and write its registered memory, on every
interface and with or without keys: keep the ports inside a trusted network.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from disagg.engines.base import Engine, EngineUnavailable, TransferError
from disagg.engines.mooncake.package import (
    SWITCHES,
    choose,
    hasten,
    moves_cuda,
    package,
    register_ranges,
    start,
)
from disagg.engines.mooncake.thread import MooncakeTransfer, PeerThread
from disagg.engines.ranges import Ranges
from disagg.host.loopback import is_loopback
from disagg.host.waker import Waker
from disagg.plan.bind import CopyBatch
from kvpool.extras import install
from kvpool.layout import Slab
from kvpool.layout.types import HOST, MAX_INT

log = logging.getLogger("disagg")

MAX_REGIONS = 1 << 16
TCP_RUN_BYTES = 4 << 20
"""Longer runs are cut over TCP: 256 MiB in one run take 1.4 times as long as in these pieces."""
HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")


class MooncakeMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's endpoint address, the token by which it is recognised, and its registered ranges."""

    protocol: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
    token: bytes
    ranges: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_REGIONS)]


@dataclass(eq=False)
class MooncakePeer:
    """A peer's registered ranges, and the thread that reads them."""

    ranges: Ranges
    thread: PeerThread


class MooncakeEngine(Engine):
    """Host memory, and CUDA memory with Mooncake's CUDA build, over `protocol` "tcp" or "rdma"
    (then `device` names NICs; default: all).

    Peers reach this host as `hostname`. Slabs are registered in ranges of at most `chunk` bytes.
    Each peer is read through its own `TransferEngine`. With `shared` one serves all peers: memory
    is registered once, but after a failed read a fence can never be certain.
    """

    name = "mooncake"
    max_bytes = 128 << 20  # a read is queued for a thread, which returns to Python once a call
    parts_in_flight = 4
    background = True
    run_overhead_bytes = 48 << 10
    progress_seconds = 0.05  # Mooncake's threads answer peers
    token_bytes: ClassVar[int] = 16
    max_regions: ClassVar[int] = MAX_REGIONS

    def __init__(
        self,
        protocol: str = "tcp",
        hostname: str = "127.0.0.1",
        device: str = "",
        chunk: int | None = None,
        shared: bool = False,
    ) -> None:
        if protocol not in self.protocols():
            known = ", ".join(self.protocols())
            raise EngineUnavailable(f"protocol {protocol!r}: engine {self.name} has {known}.")
        if not HOSTNAME.fullmatch(hostname):
            raise ValueError(f"hostname {hostname!r}: must be a host name, IPv4 address or [IPv6].")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: must be at least 1 byte.")
        package()
        choose(protocol)
        self._protocol, self._hostname, self._device = protocol, hostname, device
        self._chunk, self._shared = chunk, shared
        self._token = np.frombuffer(secrets.token_bytes(self.token_bytes), dtype=np.uint8)
        self._ranges: list[tuple[int, int]] = []
        self._own = Ranges.of([])
        self._peers: list[MooncakePeer] = []
        self._engine: Any = None
        self._held: list[np.ndarray] = []
        self._waker = Waker()
        self._exposed = False

    @classmethod
    def protocols(cls) -> Sequence[str]:
        """The protocols of this engine."""
        return tuple(SWITCHES)

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            package()
        except EngineUnavailable as reason:
            return str(reason)
        return None

    def notify(self, descriptor: int) -> None:
        """See Engine."""
        self._waker.set(descriptor)

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs in ranges; deferred until `metadata` where only peers need it."""
        self._check(slabs)
        ranges = [each for slab in slabs for each in self._chunks(slab)]
        regions = len(self._ranges) + len(ranges)
        if regions > self.max_regions:
            raise TransferError(
                f"{regions} regions: engine {self.name} registers at most {self.max_regions}. "
                "Put all buffers into one slab per device, or set a larger `chunk`."
            )
        try:
            self._own = Ranges.of([*self._ranges, *ranges])
        except ValueError as error:
            raise TransferError(f"slabs: {error}") from None
        if self._shared:
            self._serving()
        if self._engine is not None:
            with self._scope():
                register_ranges(self._engine, ranges)
        self._ranges.extend(ranges)

    def metadata(self) -> bytes:
        """The endpoint address, the token and the registered ranges."""
        port = self._serving().get_rpc_port()
        at, token = self._token.ctypes.data, self._token.tobytes()
        own = MooncakeMetadata(self._protocol, self._hostname, port, at, token, self._ranges)
        return msgspec.msgpack.encode(own)

    def connect(self, metadata: bytes) -> MooncakePeer:
        """Returns at once: the first read fails if the peer cannot be reached."""
        try:
            owner = msgspec.msgpack.decode(metadata, type=MooncakeMetadata)
            ranges = Ranges.of(owner.ranges)
        except ValueError as error:  # including msgspec's errors
            raise TransferError(f"malformed metadata: {error}") from None
        if not HOSTNAME.fullmatch(owner.hostname):
            raise TransferError(f"malformed metadata: host name {owner.hostname!r}.")
        if len(owner.token) != self.token_bytes:
            raise TransferError(f"malformed metadata: a token of {len(owner.token)} bytes.")
        if owner.protocol != self._protocol:
            raise TransferError(
                f"the peer uses Mooncake over {owner.protocol!r}, this engine over "
                f"{self._protocol!r}. Give both the same `protocol`."
            )
        address = f"{owner.hostname}:{owner.port}"
        scratch = np.zeros(self.token_bytes, dtype=np.uint8)
        shared = self._serving() if self._shared else None
        if shared is not None:
            self._held.append(scratch)
        thread = PeerThread(
            address,
            owner.token_at,
            owner.token,
            scratch,
            self._reading if shared is None else lambda: shared,
            self._shared,
            self._scope(),
            self._protocol == "tcp",
            self._waker.wake,
        )
        peer = MooncakePeer(ranges, thread)
        self._peers.append(peer)
        return peer

    def read(self, peer: MooncakePeer, batch: CopyBatch) -> MooncakeTransfer | None:
        """Queues the batch for the peer's thread, cut at the edges of registered ranges."""
        if not batch.runs:
            return None
        if self._protocol == "tcp":
            batch = batch.cut(TCP_RUN_BYTES)
        batch = peer.ranges.cut(batch, batch.src, "the peer")
        return peer.thread.read(self._own.cut(batch, batch.dst, "this engine"))

    def poll(self, transfer: MooncakeTransfer | None) -> bool:
        """Whether the thread has completed it."""
        if transfer is None:
            return True
        if not transfer.ended.is_set():
            return False
        if transfer.problem is not None:
            raise TransferError(transfer.problem)
        return True

    def fence(self, peer: MooncakePeer, timeout: float | None = None) -> bool:
        """Waits for the running call; after a failed one its `TransferEngine` is destroyed."""
        peer.thread.give_up()
        quiet = peer.thread.quiet(timeout)
        # a shared `TransferEngine` is destroyed once all threads have released it: `close` waits
        if quiet and not self._shared and peer in self._peers:
            self._peers.remove(peer)
        return quiet

    def close(self) -> None:
        """Gives up all peers, and waits for calls that may write."""
        for peer in self._peers:
            peer.thread.give_up()
        while self._peers:
            thread = self._peers.pop().thread
            if self._shared:
                thread.join()
            else:
                thread.quiet(None)
        if self._engine is not None:
            with self._scope():
                hasten(self._engine)
                self._engine = None
        self._waker.close()

    def _check(self, slabs: Sequence[Slab]) -> None:
        """Mooncake itself detects which memory a pointer is in; its non-CUDA build assumes the
        host's.
        """
        moves = (HOST, "cuda") if moves_cuda() else (HOST,)
        for slab in slabs:
            if slab.memory.partition(":")[0] not in moves:
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: this build of Mooncake moves "
                    f"{' and '.join(moves)} memory. For CUDA: {install('mooncake')}; use engine "
                    "ascend for an NPU, or build the pool with device='cpu'."
                )

    def _chunks(self, slab: Slab) -> Iterator[tuple[int, int]]:
        most = self._chunk or slab.nbytes
        for base in range(slab.base, slab.end, most):
            yield base, min(most, slab.end - base)

    def _scope(self) -> AbstractContextManager[Any]:
        """The context that a thread must be in when it calls Mooncake."""
        return nullcontext()

    def _serving(self) -> Any:
        """The `TransferEngine` that peers read from."""
        if self._engine is None:
            with self._scope():
                engine = start(self._protocol, self._hostname, self._device)
                if self._token.size:
                    register_ranges(engine, [(self._token.ctypes.data, self._token.size)])
                register_ranges(engine, self._ranges)
            self._engine = engine
            self._warn_exposed(engine)
        return self._engine

    def _reading(self) -> Any:
        """A new `TransferEngine` for reads. Over TCP it registers no memory."""
        engine = start(self._protocol, self._hostname, self._device)
        if self._protocol != "tcp":
            register_ranges(engine, self._ranges)
            self._warn_exposed(engine)
        return engine

    def _warn_exposed(self, engine: Any) -> None:
        """Says once that registered memory can be reached from other hosts."""
        if self._exposed or is_loopback(self._hostname):
            return
        self._exposed = True
        log.warning(
            "engine %s at %s: any process that reaches its port %d can read and overwrite the "
            "registered memory, also where endpoints have keys. Let a firewall admit only this "
            "deployment's hosts to TCP ports 15000 to 17000 (docs/security.md).",
            self.name,
            self._hostname,
            engine.get_rpc_port(),
        )
