"""The interface of engines, and their registry (entry points of the group `disagg.engines`).

Decode pulls: an engine only reads a peer's registered memory into its own. One thread at a time
uses an engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic

import msgspec
from typing_extensions import TypeVar

from disagg.engines.options import check_engine_options
from disagg.errors import PeerError
from disagg.host.exits import keep_for_ever
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from kvpool.layout.text import nearest

PeerT = TypeVar("PeerT", default=Any)
TransferT = TypeVar("TransferT", default=Any)
MetadataT = TypeVar("MetadataT")

FENCE_POLL_SECONDS = 0.0005
"""Interval at which a waiting `fence` checks again."""


def wait_until(quiet: Callable[[], bool], timeout: float | None) -> bool:
    """Whether `quiet()` was true within `timeout` seconds, which means what it does to `fence`."""
    stop = None if timeout is None else time.monotonic() + timeout
    while not quiet():
        if stop is not None and time.monotonic() >= stop:
            return False
        time.sleep(FENCE_POLL_SECONDS)
    return True


class EngineUnavailable(RuntimeError):
    """The requested engine cannot work here; the message says what is missing."""


class TransferError(PeerError, RuntimeError):
    """A read failed or would leave registered memory; none of its bytes may be relied on."""


def decode_metadata(data: bytes, kind: type[MetadataT], what: str = "metadata") -> MetadataT:
    """A peer's metadata, or what else it gives (untrusted). Raises TransferError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"malformed {what}: {error}") from None


def one_memory(slabs: Sequence[Slab], registered: str = "") -> str:
    """The memory that all slabs share, with what is registered. Raises TransferError."""
    for slab in slabs:
        if registered not in ("", slab.memory):
            raise TransferError(
                f"slab of {slab.nbytes} bytes on {slab.memory}, others on {registered}: an engine "
                "serves one memory. Create an endpoint with an engine for each."
            )
        registered = slab.memory
    return registered


class Engine(ABC, Generic[PeerT, TransferT]):
    """Reads batches from peers; each engine has types of its own for peers and transfers."""

    name: ClassVar[str]
    """That of its entry point."""
    max_bytes: int = 16 << 20
    """Most bytes per `read`: a part. If `read` or `poll` copy before they return, few enough that
    control messages are served in between; else many, since each part needs the reader's thread.
    """
    max_runs: int = 16384
    """Most runs per `read`."""
    parts_in_flight: int = 2
    """Parts of one request that are posted before the first of them has arrived, at most."""
    background: bool = False
    """Whether other threads move the bytes and tell the descriptor of `notify` when they have. Then
    `read` and `poll` never wait, and nothing is gained by polling without a pause.
    """
    run_overhead_bytes: ClassVar[int] = 0
    """Fixed cost of a run, in bytes moved in that time; if any, small runs are read by staging."""
    progress_seconds: float = 0.001
    """Interval at which `progress` is called while a peer may be reading."""

    @classmethod
    @abstractmethod
    def availability(cls) -> str | None:
        """None if the engine works here, else the reason why not."""

    def reached_at(self, host: str) -> None:
        """Says, before `register`, by which host (an IP address or a name) peers reach this one:
        what the engine offers them, unless it was given another. Raises ValueError if peers would
        be led elsewhere by what it was given, or if it cannot be read at that host.
        """

    def offered_host(self, metadata: bytes) -> str | None:
        """The host that a peer's metadata (untrusted) names; None if the engine finds its peers in
        other ways. Raises TransferError.
        """
        return None

    @abstractmethod
    def register(self, slabs: Sequence[Slab]) -> None:
        """Makes memory readable by peers and writable by this engine's reads."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to read the registered memory; called after `register`."""

    @abstractmethod
    def connect(self, metadata: bytes) -> PeerT:
        """A peer, from its `metadata()` (untrusted). Raises TransferError if unreachable."""

    @abstractmethod
    def read(self, peer: PeerT, batch: CopyBatch) -> TransferT:
        """Starts copying the runs of `batch` from the peer; returns a transfer to `poll`.

        The batch's arrays may be reused after the call. Raises TransferError.
        """

    @abstractmethod
    def poll(self, transfer: TransferT) -> bool:
        """Whether every byte has arrived. Raises TransferError if the transfer has failed."""

    def notify(self, descriptor: int) -> None:
        """Names a non-blocking descriptor, once and before the first read: an engine whose
        transfers end in other threads writes a byte to a duplicate of it when one may have ended.
        """

    def progress(self) -> None:
        """Lets peers' reads proceed; called often on the side that is read."""

    def take_renewal(self) -> str | None:
        """Why peers have to connect again, by the `metadata` of now; each reason once. Asked after
        `progress`.
        """
        return None

    def yield_gil(self) -> None:
        """Lets threads of the engine have the GIL, where they need it to go on with a read: called
        after each turn of a caller that may be busy in Python until the next. They would get it
        5 ms late, several times a read.
        """

    @abstractmethod
    def fence(self, peer: PeerT, timeout: float | None = None) -> bool:
        """Gives up a peer and its reads; True once no byte of them can land here.

        With a `timeout` in seconds (0: do not wait) it may return False; call it again then.
        Without one it waits. Other peers' reads go on. Raises TransferError if it is never certain.
        """

    def telemetry(self) -> Mapping[str, float]:
        """The engine's own counters since it was created, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Gives up all peers and releases the memory."""

    def abandon(self) -> None:
        """In a forked child: gives up what is the parent's without touching it. The last call."""
        keep_for_ever(self)


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="disagg.engines")}


def engine_names() -> list[str]:
    """Names of all installed engines, whether they work here or not."""
    return sorted(_entries())


def engine_class(name: str) -> type[Engine]:
    """The class of an engine by name. Raises EngineUnavailable: of an unknown name with the known
    ones, or that its package cannot be loaded.
    """
    entry = _entries().get(name)
    if entry is None:
        names = engine_names()
        alike = nearest(name, names)
        raise EngineUnavailable(f"engine {name!r} is unknown; known: {', '.join(names)}.{alike}")
    try:
        engine: type[Engine] = entry.load()
    except Exception as error:  # of a package that is not ours
        package = entry.dist.name if entry.dist else entry.module
        raise EngineUnavailable(
            f"engine {name!r} of package {package} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from None
    return engine


def create_engine(name: str, **options: Any) -> Engine:
    """An engine by name. Raises EngineUnavailable with the reason if it cannot work here, and
    ValueError for options that it does not have.
    """
    kind = engine_class(name)
    if not hasattr(kind, "name"):
        raise EngineUnavailable(
            f"engine {name!r}: {kind.__qualname__} says no name. Set `name` to that of its entry "
            "point."
        )
    check_engine_options(name, kind, options)
    reason = kind.availability()
    if reason is not None:
        raise EngineUnavailable(f"engine {name!r}: {reason}")
    return kind(**options)


def need_engine(engine: object) -> None:
    """Raises TypeError for what is none, nor stands for one."""
    if not hasattr(engine, "register"):
        raise TypeError(f"engine: an Engine such as create_engine('local'), got {engine!r}.")
