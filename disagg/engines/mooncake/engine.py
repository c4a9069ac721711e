"""Reads through Mooncake's transfer engine: TCP between any two hosts, RDMA where there are NICs.

Whoever reaches a registered process's Mooncake ports can read and write what is registered: they
belong in a network of one's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from disagg.engines.base import Engine, EngineUnavailable, TransferError
from disagg.engines.mooncake.link import (
    SWITCHES,
    Link,
    Transfer,
    choose,
    hasten,
    moves_cuda,
    package,
    register,
    start,
)
from disagg.engines.ranges import Ranges
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from kvpool.layout.types import MAX_INT

MAX_RANGES = 1 << 16
POLL_SECONDS = 0.0005
"""Whoever polls without a pause takes a third to two thirds of the rate on two cores."""
HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a peer answers, what it keeps there to be known by, and what it registered."""

    protocol: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
    token: bytes
    ranges: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_RANGES)]


@dataclass(eq=False)
class Peer:
    """What may be read of a peer, and through what."""

    ranges: Ranges
    link: Link


class MooncakeEngine(Engine):
    """Memory of the host, and of CUDA devices with Mooncake's CUDA build, over `protocol` "tcp" or
    "rdma" (then `device` names NICs, all by default).

    `hostname` is what peers reach this host by. Slabs are registered in pieces of at most `chunk`
    bytes. Each peer is read through a `TransferEngine` of its own; with `shared` all are through
    one: memory is registered once, but what a failed read wrote to is never known to be quiet.
    """

    name = "mooncake"
    run_overhead_bytes = 48 << 10
    progress_seconds = 0.05  # its own threads answer peers
    token_bytes: ClassVar[int] = 16
    max_regions: ClassVar[int] = MAX_RANGES

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
            raise EngineUnavailable(f"protocol {protocol!r}: engine {self.name} knows {known}.")
        if not HOSTNAME.fullmatch(hostname):
            raise ValueError(f"hostname {hostname!r}: a host name, an IPv4 address or [IPv6].")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: a number of bytes above 0.")
        package()
        choose(protocol)
        self._protocol, self._hostname, self._device = protocol, hostname, device
        self._chunk, self._shared = chunk, shared
        self._token = np.frombuffer(secrets.token_bytes(self.token_bytes), dtype=np.uint8)
        self._stretches: list[tuple[int, int]] = []
        self._own = Ranges.of([])
        self._peers: list[Peer] = []
        self._engine: Any = None
        self._held: list[np.ndarray] = []

    @classmethod
    def protocols(cls) -> Sequence[str]:
        """What it can be asked for."""
        return tuple(SWITCHES)

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            package()
        except EngineUnavailable as reason:
            return str(reason)
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs in pieces; where nobody but `metadata` needs them so, not before it."""
        self._check(slabs)
        pieces = [piece for slab in slabs for piece in self._pieces(slab)]
        regions = len(self._stretches) + len(pieces)
        if regions > self.max_regions:
            raise TransferError(
                f"{regions} regions of memory, engine {self.name} registers {self.max_regions}. "
                "Put all buffers into one slab per device, and make `chunk` larger if it is set."
            )
        try:
            self._own = Ranges.of([*self._stretches, *pieces])
        except ValueError as error:
            raise TransferError(f"slabs: {error}") from None
        if self._shared:
            self._serving()
        if self._engine is not None:
            with self._scope():
                register(self._engine, pieces)
        self._stretches.extend(pieces)

    def metadata(self) -> bytes:
        """The address, the token and the registered pieces."""
        port = self._serving().get_rpc_port()
        at, token = self._token.ctypes.data, self._token.tobytes()
        own = Metadata(self._protocol, self._hostname, port, at, token, self._stretches)
        return msgspec.msgpack.encode(own)

    def connect(self, metadata: bytes) -> Peer:
        """Returns at once: a peer that cannot be reached is an error of the first read."""
        try:
            owner = msgspec.msgpack.decode(metadata, type=Metadata)
            ranges = Ranges.of(owner.ranges)
        except ValueError as error:  # msgspec's among them
            raise TransferError(f"malformed metadata: {error}") from None
        if not HOSTNAME.fullmatch(owner.hostname):
            raise TransferError(f"malformed metadata: {owner.hostname!r} is no host name.")
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
        link = Link(
            address,
            owner.token_at,
            owner.token,
            scratch,
            self._reading if shared is None else lambda: shared,
            self._shared,
            self._scope(),
        )
        peer = Peer(ranges, link)
        self._peers.append(peer)
        return peer

    def read(self, peer: Peer, batch: CopyBatch) -> Transfer | None:
        """Hands the batch to the peer's thread, cut where one registered piece ends."""
        if not batch.runs:
            return None
        batch = peer.ranges.cut(batch, batch.src, "the peer")
        return peer.link.read(self._own.cut(batch, batch.dst, "this engine"))

    def poll(self, transfer: Transfer | None) -> bool:
        """Whether its thread is done with it; leaves the processor to it for a moment."""
        if transfer is None:
            return True
        if not transfer.ended.wait(POLL_SECONDS):
            return False
        if transfer.problem is not None:
            raise TransferError(transfer.problem)
        return True

    def fence(self, peer: Peer, timeout: float | None = None) -> bool:
        """Lets the call that runs come to its end, a failed one's `TransferEngine` be destroyed."""
        peer.link.give_up()
        quiet = peer.link.quiet(timeout)
        # what is shared is destroyed when all threads have let go of it: those `close` waits for
        if quiet and not self._shared and peer in self._peers:
            self._peers.remove(peer)
        return quiet

    def close(self) -> None:
        """Gives up all peers, and waits for calls that may write."""
        for peer in self._peers:
            peer.link.give_up()
        while self._peers:
            link = self._peers.pop().link
            if self._shared:
                link.join()
            else:
                link.quiet(None)
        if self._engine is not None:
            with self._scope():
                hasten(self._engine)
                self._engine = None

    def _check(self, slabs: Sequence[Slab]) -> None:
        """Mooncake finds out itself where an address lies; its non-CUDA build takes any for the
        host's.
        """
        moves = ("cpu", "cuda") if moves_cuda() else ("cpu",)
        for slab in slabs:
            if slab.memory.partition(":")[0] not in moves:
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: this build of Mooncake moves "
                    f"{' and '.join(moves)} memory. Install kvpool[mooncake] for CUDA, use engine "
                    "ascend for an NPU, or build the pool with device='cpu'."
                )

    def _pieces(self, slab: Slab) -> Iterator[tuple[int, int]]:
        most = self._chunk or slab.nbytes
        for base in range(slab.base, slab.end, most):
            yield base, min(most, slab.end - base)

    def _scope(self) -> AbstractContextManager[Any]:
        """What a thread must be in when it uses Mooncake."""
        return nullcontext()

    def _serving(self) -> Any:
        """The `TransferEngine` that peers read from."""
        if self._engine is None:
            with self._scope():
                engine = start(self._protocol, self._hostname, self._device)
                if self._token.size:
                    register(engine, [(self._token.ctypes.data, self._token.size)])
                register(engine, self._stretches)
            self._engine = engine
        return self._engine

    def _reading(self) -> Any:
        """A new `TransferEngine` that reads; over TCP, memory that it writes is not registered."""
        engine = start(self._protocol, self._hostname, self._device)
        if self._protocol != "tcp":
            register(engine, self._stretches)
        return engine
