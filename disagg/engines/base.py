"""The protocol that every engine keeps, and the registry through which one is asked for by name.

Decode pulls: an engine only ever reads a peer's registered memory into its own. An engine is used
by one thread at a time. Adding one touches one file and one entry point of the group
`disagg.engines`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab


class EngineUnavailable(RuntimeError):
    """The engine that was asked for cannot work here; the message says what is missing."""


class TransferError(RuntimeError):
    """A read failed, or would have left registered memory; none of its bytes may be relied on."""


class Engine(ABC):
    """Reads batches out of peers. `Peer` and `Transfer` objects are the engine's own and opaque."""

    name: ClassVar[str]
    max_bytes: ClassVar[int] = 16 << 20
    """Most bytes that one `read` should carry, so that control messages are served in between."""
    max_runs: ClassVar[int] = 16384
    """Most runs that one `read` may carry."""
    run_overhead_bytes: ClassVar[int] = 0
    """What a run costs beside its bytes: as many as could be moved in that time. Where it is not 0,
    small runs go by way of `disagg.runtime.staging`.
    """
    progress_seconds: ClassVar[float] = 0.001
    """How often `progress` is to be called where a peer may be reading."""

    @classmethod
    @abstractmethod
    def availability(cls) -> str | None:
        """None if the engine works here, else the reason why not."""

    @abstractmethod
    def register(self, slabs: Sequence[Slab]) -> None:
        """Makes memory readable by peers, and writable by one's own reads."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer must know to read what was registered; called after `register`."""

    @abstractmethod
    def connect(self, metadata: bytes) -> Any:
        """A peer, from what its `metadata()` returned (untrusted). Raises TransferError if
        unreachable.
        """

    @abstractmethod
    def read(self, peer: Any, batch: CopyBatch) -> Any:
        """Starts to copy the runs of `batch` from the peer; returns a transfer to `poll`.

        The batch's arrays are not needed after the call. Raises TransferError.
        """

    @abstractmethod
    def poll(self, transfer: Any) -> bool:
        """Whether every byte has arrived. Raises TransferError if one will not."""

    def progress(self) -> None:
        """Lets reads by peers go on; called often by whoever serves them."""

    @abstractmethod
    def fence(self, peer: Any, timeout: float | None = None) -> bool:
        """Gives a peer up, with all its reads; whether no byte of one can still land here.

        With a `timeout` in seconds (0: at once) it may answer False: then call it again. Without,
        it waits as long as it takes. Other peers' reads go on. Raises TransferError if it can
        never be known.
        """

    def telemetry(self) -> Mapping[str, float]:
        """What the engine itself counts, since it was made: a name and a number each."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Gives up all peers and memory."""


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="disagg.engines")}


def engine_names() -> list[str]:
    """Names of all engines that are known here, whether they work or not."""
    return sorted(_entries())


def engine_class(name: str) -> type[Engine]:
    """The class of an engine by name; raises EngineUnavailable with the names that are known."""
    entry = _entries().get(name)
    if entry is None:
        raise EngineUnavailable(f"engine {name!r}: known are {', '.join(engine_names())}.")
    found: type[Engine] = entry.load()
    return found


def create_engine(name: str, **options: Any) -> Engine:
    """An engine by name; raises EngineUnavailable with the reason if it cannot work here."""
    kind = engine_class(name)
    reason = kind.availability()
    if reason is not None:
        raise EngineUnavailable(f"engine {name!r}: {reason}")
    return kind(**options)
