"""Reads through AMD's MoRI-IO over RDMA, from each peer by an `IOEngine` of its own.

A peer is an address and a port, which another process may have taken over; so each read is followed
by one of a token: the process that answers with it has answered all along.

MoRI has no cancellation, and a read that it calls failed may have parts in flight. Destroying the
`IOEngine` with its queue pairs and registrations ends them, so only `MoriIO` refers to it.

Written from MoRI's sources and SGLang's and vLLM's calls of it; not yet run (docs/engines.md).
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import secrets
import socket
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from disagg.engines.base import EngineUnavailable, TransferError, decode_metadata
from disagg.engines.ranges import MAX_REGIONS, Ranges
from disagg.engines.threaded import GIVEN_UP, BlockingReader, ThreadedEngine, ThreadedPeer
from kvpool.extras import absent, install
from kvpool.layout import Slab
from kvpool.layout.grid import Ints
from kvpool.layout.types import HOST

NO_XGMI = "MORI_DISABLE_AUTO_XGMI"
TOKEN_BYTES = 16
SPENT = 1024
"""Statuses that are kept after success: MoRI's thread may still be leaving one."""
WAIT_MILLISECONDS = 100
"""Interval at which a thread that waits for a read sees that its peer was given up."""


class MoriMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to read from this side: MoRI's packed `EngineDesc` and `MemoryDesc`s. The
    registration `token_memory` begins with `token`.
    """

    engine: bytes
    token: bytes
    token_memory: bytes
    memory: Annotated[list[bytes], msgspec.Meta(max_length=MAX_REGIONS)]


class MoriEngine(ThreadedEngine):
    """Memory of the host and of AMD GPUs over RDMA. Peers reach this host as `hostname`, an IPv4
    address (default: as its endpoint). Each peer is read through its own `IOEngine`.
    """

    name = "mori"
    # of `max_bytes`: MoRI joins runs, and refuses more than the longest message of the NIC
    max_runs = 4096  # four parts fit the send queues; for more MoRI would wait

    def __init__(self, hostname: str | None = None) -> None:
        reason = self.availability()
        if reason is not None:
            raise EngineUnavailable(f"engine mori: {reason}")
        _check_host(hostname or "127.0.0.1")
        if os.environ.setdefault(NO_XGMI, "1")[:1] in ("", "0"):
            raise EngineUnavailable(
                f"{NO_XGMI}={os.environ[NO_XGMI]}: MoRI could move bytes over XGMI, and engine "
                "mori knows only how its RDMA reads end. Unset the variable."
            )
        super().__init__(hostname)
        self._slabs: list[Slab] = []
        self._serving: MoriIO | None = None

    @classmethod
    def availability(cls) -> str | None:
        """All that is missing, found without importing MoRI; if nothing is, it must load."""
        reason = absent(
            {
                "an AMD GPU with its driver (/dev/kfd)": _driver(),
                "a NIC with an active RDMA port (/sys/class/infiniband)": _active_port(),
                f"MoRI ({install('mori')})": find_spec("mori") is not None,
            }
        )
        if reason is None:
            try:
                mori_io()
            except EngineUnavailable as error:
                return str(error)
        return reason

    def reached_at(self, host: str) -> None:
        super().reached_at(host)
        _check_host(self._hostname)

    def offered_host(self, metadata: bytes) -> str | None:
        with suppress(Exception):  # malformed: `connect` says how
            owner = decode_metadata(metadata, MoriMetadata)
            return str(mori_io().EngineDesc.unpack(owner.engine).host)
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of any memory of this host, before the first `connect`. MoRI hands them
        to NICs when they are first read, and ends the process if a NIC refuses one.
        """
        if self._peers:
            raise TransferError("peers are read already: register all memory before.")
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            if slab.memory != HOST and not (kind == "cuda" and number.isdecimal()):
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: engine mori moves memory of "
                    f"{HOST} and cuda:N, as torch calls AMD GPUs."
                )
        ranges = [(slab.base, slab.nbytes) for slab in slabs]
        self._claim(ranges)
        self._ranges.extend(ranges)
        self._slabs.extend(slabs)
        if self._serving is not None:
            self._serving.register(slabs)

    def metadata(self) -> bytes:
        """The serving `IOEngine`, its token and its registrations."""
        if self._serving is None:
            self._serving = self._io()
        io = self._serving
        bases = io.token_base, *(slab.base for slab in self._slabs)
        token, *memory = (bytes(io.memory[base].pack()) for base in bases)
        engine = bytes(io.perform("description", "get_engine_desc").pack())
        return msgspec.msgpack.encode(MoriMetadata(engine, bytes(io.tokens[0]), token, memory))

    def connect(self, metadata: bytes) -> ThreadedPeer:
        """Returns at once: the first read fails if the peer cannot be reached."""
        owner, api = decode_metadata(metadata, MoriMetadata), mori_io()
        try:
            engine = api.EngineDesc.unpack(owner.engine)
            token, *memory = (api.MemoryDesc.unpack(m) for m in (owner.token_memory, *owner.memory))
            Ranges.of((desc.data, desc.size) for desc in (token, *memory))
            if any(desc.engine_key != engine.key for desc in (token, *memory)):
                raise ValueError("memory of another engine.")
            if len(owner.token) != TOKEN_BYTES or token.size < TOKEN_BYTES:
                raise ValueError("a token of another size.")
        except Exception as error:  # those of C++ have no type of their own
            raise TransferError(f"malformed metadata: {error}") from None
        reader = MoriReader(
            engine=engine,
            token=owner.token,
            token_base=token.data,
            memory={desc.data: desc for desc in (token, *memory)},
            ranges=Ranges.of((desc.data, desc.size) for desc in memory),
            own=self._own,
            obtain=self._io,
        )
        return self._connected(f"mori {reader.address}", reader, reader.ranges)

    def close(self) -> None:
        """Gives up all peers at once, and destroys what reads and what serves."""
        peers = list(self._peers)
        super().close()
        for peer in peers:
            peer.join()
        if not (self._serving is None or self._serving.destroy()):
            raise TransferError("MoRI's IOEngine cannot be destroyed: an object refers to it.")

    def _io(self) -> MoriIO:
        io = MoriIO(self._hostname, self._slabs)
        self._warn_exposed(io.perform("description", "get_engine_desc").port, self._hostname)
        return io


def _check_host(hostname: str) -> None:
    """MoRI ends the process if it cannot listen there."""
    try:
        wrong = ipaddress.IPv4Address(hostname).is_unspecified
        with socket.socket() as probe:
            probe.bind((hostname, 0))
    except (ValueError, OSError):
        wrong = True
    if wrong:
        raise ValueError(f"hostname {hostname!r}: must be an IPv4 address of this host.")


def _driver() -> bool:
    return Path("/dev/kfd").exists()


def _active_port() -> bool:
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in state.read_text() for state in states)


class MoriRuns(NamedTuple):
    """Runs from one of a peer's registrations into one of ours, by their bases: rows of offsets
    into both, and of lengths, `[3, N]`.
    """

    src_base: int
    dst_base: int
    rows: Ints


class MoriIO:
    """An `IOEngine` with the RDMA backend, where slabs are registered. One thread at a time uses
    it. All methods raise TransferError with MoRI's reason.
    """

    def __init__(self, hostname: str, slabs: Sequence[Slab]) -> None:
        api = mori_io()
        self.tokens = np.zeros((2, TOKEN_BYTES), dtype=np.uint8)
        """What a peer reads to know that this process answers, and place for a peer's."""
        self.tokens[0] = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), dtype=np.uint8)
        self.token_base = int(self.tokens.ctypes.data)
        self.memory: dict[int, Any] = {}
        """`MemoryDesc`s of what is registered, by base."""
        self._statuses: list[Any] = []
        name, place = f"kvpool-{uuid.uuid4().hex}", api.IOEngineConfig(host=hostname, port=0)
        self._io = api.IOEngine(name, place)
        self._alive = weakref.ref(self._io)
        # SGLang's numbers of queue pairs, posts and threads. No notifications: peers need none, and
        # one that fails would fail its read
        config = api.RdmaBackendConfig(4, -1, 4, api.PollCqMode.POLLING, False)
        self.perform(f"RDMA on {hostname}", "create_backend", api.BackendType.RDMA, config)
        self.register([Slab(self.token_base, self.tokens.nbytes), *slabs])

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers memory of the host or of a GPU."""
        locations = mori_io().MemoryLocationType
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            place = (-1, locations.CPU) if kind == HOST else (int(number), locations.GPU)
            action = f"registration of {slab.nbytes} bytes on {slab.memory}"
            desc = self.perform(action, "register_memory", slab.base, slab.nbytes, *place)
            self.memory[slab.base] = desc

    def post(self, memory: Any, runs: MoriRuns) -> Any:
        """Posts a read from a peer's `MemoryDesc` and returns its `TransferStatus`."""
        number = self.perform("number", "allocate_transfer_uid")
        src, dst, nbytes = runs.rows.tolist()
        sides = [self.memory[runs.dst_base]], [dst], [memory], [src]
        action = f"read of {len(nbytes)} runs"
        [status] = self.perform(action, "batch_read", *sides, [nbytes], [number])
        # MoRI writes to it until the read has succeeded or the IOEngine is destroyed
        self._statuses.append(status)
        return status

    def succeeded(self) -> None:
        """All that was posted has succeeded."""
        del self._statuses[:-SPENT]

    def destroy(self) -> bool:
        """Lets go of the `IOEngine`; True once it is gone, so that no further byte can land."""
        self._io = None
        return self._alive() is None

    def perform(self, action: str, method: str, *arguments: Any) -> Any:
        """What a method of the `IOEngine` returns."""
        try:
            return getattr(self._io, method)(*arguments)
        except Exception as error:  # of C++, without a type of their own
            reason = str(error)
        # not in the `except`: the traceback of MoRI's error keeps the IOEngine alive
        raise TransferError(f"MoRI's {action}: {reason}")


@dataclass(eq=False, kw_only=True)
class MoriReader(BlockingReader):
    """`obtain` makes the `IOEngine`; `own` are its registrations, `ranges` the peer's, whose
    `MemoryDesc`s are in `memory` by base.
    """

    undestroyed = "an object still refers to MoRI's IOEngine."

    engine: Any
    token: bytes
    token_base: int
    memory: dict[int, Any]
    ranges: Ranges
    own: Ranges
    obtain: Callable[[], MoriIO]
    io: MoriIO | None = None
    given_up: bool = False

    @property
    def address(self) -> str:
        """Where the peer's `IOEngine` listens."""
        return f"{self.engine.host}:{self.engine.port}"

    def start(self) -> None:
        """Makes the `IOEngine`. The first read fails if the peer cannot be reached."""
        self.io = self.obtain()
        self.io.perform("peer", "register_remote_engine", self.engine)

    def calls(self, rows: Ints) -> list[list[MoriRuns]]:
        """One call: its runs by pair of registrations. Each run lies in one pair."""
        pairs = np.stack([self.ranges.number(rows[0]), self.own.number(rows[1])])
        call = []
        for pair in np.unique(pairs, axis=1).T:
            bases = np.array([self.ranges.starts[pair[0]], self.own.starts[pair[1]], 0])
            offsets = rows[:, (pairs == pair[:, None]).all(axis=0)] - bases[:, None]
            call.append(MoriRuns(int(bases[0]), int(bases[1]), offsets))
        return [call]

    def fetch(self, call: list[MoriRuns]) -> None:
        """Posts reads, behind them that of the token, and waits for them."""
        io = self.io
        assert io is not None
        behind_own = np.array([[0], [TOKEN_BYTES], [TOKEN_BYTES]])
        io.tokens[1] = 0
        statuses = []
        for runs in (*call, MoriRuns(self.token_base, io.token_base, behind_own)):
            statuses.append(io.post(self.memory[runs.src_base], runs))
            if statuses[-1].Failed():
                break  # nothing is posted behind it
        for status in statuses:
            while status.InProgress() and not self.given_up:
                status.WaitFor(WAIT_MILLISECONDS)
            if not status.Succeeded():
                reason = status.Message() if status.Failed() else GIVEN_UP
                raise TransferError(f"MoRI cannot read from {self.address}: {reason}")
        io.succeeded()
        if bytes(io.tokens[1]) != self.token:
            raise TransferError(
                f"another process answers at {self.address}. Connect with the peer's new metadata."
            )

    def give_up(self) -> None:
        """Ends the wait for a read."""
        self.given_up = True

    def end(self) -> bool:
        """Destroys the `IOEngine`."""
        return self.io is None or self.io.destroy()  # there is none if `start` failed


def mori_io() -> Any:
    """MoRI's module `mori.io`. Raises EngineUnavailable with the reason."""
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise EngineUnavailable(
            f"MoRI cannot be loaded: {error}. It needs a torch for ROCm and, on Debian, apt-get "
            "install libibverbs1 libpci3."
        ) from None
