"""Reads through Mooncake's transfer engine, over TCP or RDMA.

Anyone who can reach a process's Mooncake ports can read and write its registered memory, on every
interface and with or without keys: keep the ports inside a trusted network.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from disagg.engines.base import EngineUnavailable, TransferError, decode_metadata
from disagg.engines.mooncake import package as mooncake
from disagg.engines.ranges import MAX_REGIONS, Ranges
from disagg.engines.threaded import BlockingReader, ThreadedEngine, ThreadedPeer, ThreadedTransfer
from disagg.plan.bind import CopyBatch
from kvpool.extras import install
from kvpool.layout import Slab
from kvpool.layout.grid import Ints
from kvpool.layout.types import HOST, MAX_INT

TCP_RUN_BYTES = 4 << 20
"""Longer runs are cut over TCP: 256 MiB in one run take 1.4 times as long as in these pieces."""
CALL_RUNS = 1023
"""Runs per call, and one to poll. More would queue again, where a second's wait is an error."""
POLLED_BYTES = 1 << 20
"""Shorter reads end before a pause is worth it."""
HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")


class MooncakeMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A peer's endpoint address, the token by which it is recognised, and its registered ranges."""

    protocol: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
    token: bytes
    ranges: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_REGIONS)]


class MooncakeEngine(ThreadedEngine):
    """Host memory, and CUDA memory with Mooncake's CUDA build, over `protocol` "tcp" or "rdma"
    (then `device` names NICs; default: all).

    Peers reach this host as `hostname`. Slabs are registered in ranges of at most `chunk` bytes.
    Each peer is read through its own `TransferEngine`.
    """

    name = "mooncake"
    run_overhead_bytes = 48 << 10
    ports = " to TCP ports 15000 to 17000"
    token_bytes: ClassVar[int] = 16
    max_regions: ClassVar[int] = MAX_REGIONS
    protocols: ClassVar[tuple[str, ...]] = tuple(mooncake.SWITCHES)

    def __init__(
        self,
        protocol: str = "tcp",
        hostname: str = "127.0.0.1",
        device: str = "",
        chunk: int | None = None,
    ) -> None:
        if protocol not in self.protocols:
            protocols = ", ".join(self.protocols)
            raise EngineUnavailable(f"protocol {protocol!r}: engine {self.name} has {protocols}.")
        if not HOSTNAME.fullmatch(hostname):
            raise ValueError(f"hostname {hostname!r}: must be a host name, IPv4 address or [IPv6].")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: must be at least 1 byte.")
        mooncake.package()
        mooncake.choose(protocol)
        mooncake.check_ipv6(hostname)
        super().__init__(hostname)
        self._protocol, self._device, self._chunk = protocol, device, chunk
        self.over_tcp = protocol == "tcp"
        self._token = np.frombuffer(secrets.token_bytes(self.token_bytes), dtype=np.uint8)
        self._engine: Any = None

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            mooncake.package()
        except EngineUnavailable as reason:
            return str(reason)
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs in ranges; deferred until `metadata` where only peers need it."""
        self._check(slabs)
        ranges = [chunk for slab in slabs for chunk in self._chunks(slab)]
        regions = len(self._ranges) + len(ranges)
        if regions > self.max_regions:
            raise TransferError(
                f"{regions} regions: engine {self.name} registers at most {self.max_regions}. "
                "Put all buffers into one slab per device, or set a larger `chunk`."
            )
        self._claim(ranges)
        if self.shared:
            self._serving()
        if self._engine is not None:
            with self._scope():
                mooncake.register_ranges(self._engine, ranges)
        self._ranges.extend(ranges)

    def metadata(self) -> bytes:
        """The endpoint address, the token and the registered ranges."""
        own = MooncakeMetadata(
            protocol=self._protocol,
            hostname=self._hostname,
            port=self._serving().get_rpc_port(),
            token_at=self._token.ctypes.data,
            token=self._token.tobytes(),
            ranges=self._ranges,
        )
        return msgspec.msgpack.encode(own)

    def connect(self, metadata: bytes) -> ThreadedPeer:
        """Returns at once: the first read fails if the peer cannot be reached."""
        owner = decode_metadata(metadata, MooncakeMetadata)
        try:
            ranges = Ranges.of(owner.ranges)
            if not HOSTNAME.fullmatch(owner.hostname):
                raise ValueError(f"host name {owner.hostname!r}.")
            if len(owner.token) != self.token_bytes:
                raise ValueError(f"a token of {len(owner.token)} bytes.")
        except ValueError as error:
            raise TransferError(f"malformed metadata: {error}") from None
        if owner.protocol != self._protocol:
            raise TransferError(
                f"the peer uses Mooncake over {owner.protocol!r}, this engine over "
                f"{self._protocol!r}. Give both the same `protocol`."
            )
        reader = MooncakeReader(owner, self, self._scope())
        return self._connected(f"mooncake {reader.address}", reader, ranges)

    def read(self, peer: ThreadedPeer, batch: CopyBatch) -> ThreadedTransfer | None:
        return super().read(peer, batch.cut(TCP_RUN_BYTES) if self.over_tcp else batch)

    def close(self) -> None:
        super().close()
        if self._engine is not None:
            with self._scope():
                mooncake.hasten(self._engine)
                self._engine = None

    def _check(self, slabs: Sequence[Slab]) -> None:
        """Mooncake detects which memory a pointer is in; its non-CUDA build assumes the host's."""
        moves = (HOST, "cuda") if mooncake.moves_cuda() else (HOST,)
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
                engine = mooncake.start(self._protocol, self._hostname, self._device)
                if self._token.size:
                    mooncake.register_ranges(engine, [(self._token.ctypes.data, self._token.size)])
                mooncake.register_ranges(engine, self._ranges)
            self._engine = engine
            self._warn_exposed(engine.get_rpc_port())
        return self._engine

    def reading(self) -> Any:
        """The `TransferEngine` for reads from one peer. Over TCP a new one registers no memory."""
        if self.shared:
            return self._serving()
        engine = mooncake.start(self._protocol, self._hostname, self._device)
        if not self.over_tcp:
            mooncake.register_ranges(engine, self._ranges)
            self._warn_exposed(engine.get_rpc_port())
        return engine


@dataclass(eq=False, slots=True)
class MooncakeReader(BlockingReader):
    """Reads from `owner` into the memory of `own`. `scratch` receives the peer's token and must
    live as long as the `TransferEngine`, which is not destroyed if other peers use it too.
    """

    undestroyed = "all peers share one TransferEngine."

    owner: MooncakeMetadata
    own: MooncakeEngine
    scope: AbstractContextManager[Any]
    scratch: np.ndarray = field(init=False)
    engine: Any = None

    @property
    def address(self) -> str:
        """Where the peer's `TransferEngine` answers."""
        return f"{self.owner.hostname}:{self.owner.port}"

    def start(self) -> None:
        """Checks that the peer answers, and no other process."""
        self.engine = self.own.reading()
        if not self.owner.token:
            return
        self.scratch = np.zeros(len(self.owner.token), dtype=np.uint8)
        base, nbytes = self.scratch.ctypes.data, self.scratch.nbytes
        mooncake.register_ranges(self.engine, [(base, nbytes)])
        if not mooncake.fetch(self.engine, self.address, [[self.owner.token_at], [base], [nbytes]]):
            raise TransferError(
                f"no answer at {self.address}. Check that the peer is alive, and that its "
                "`hostname` can be reached from here."
            )
        self.engine.unregister_memory(base)
        if self.scratch.tobytes() != self.owner.token:
            raise TransferError(
                f"another process answers at {self.address}. Set the peer's `hostname` to its "
                "own host."
            )

    def calls(self, rows: Ints) -> list[Ints]:
        """As many runs as Mooncake queues."""
        return [rows[:, first : first + CALL_RUNS] for first in range(0, rows.shape[1], CALL_RUNS)]

    def fetch(self, call: Ints) -> None:
        """In one attempt."""
        # over TCP the core is left to others while Mooncake's threads read
        polled = self.own.over_tcp and bool(call[2].sum() >= POLLED_BYTES)
        if not mooncake.fetch(self.engine, self.address, call.tolist(), polled=polled):
            raise TransferError(
                f"Mooncake cannot read {call.shape[1]} runs from {self.address}: the peer is dead, "
                "stopped or out of reach. See Mooncake's log on stderr."
            )

    def end(self) -> bool:
        """Lets go of a shared `TransferEngine`, and destroys another."""
        if self.engine is None or self.own.shared:
            self.engine = None
            return False
        gone = weakref.ref(self.engine)
        mooncake.hasten(self.engine)
        self.engine = None
        return gone() is None
