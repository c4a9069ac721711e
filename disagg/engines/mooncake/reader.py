"""Reads from one peer by a `TransferEngine`, which is checked and destroyed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.mooncake.package import fetch, hasten, register_ranges
from disagg.engines.threaded import BlockingReader
from kvpool.layout.grid import Ints
from kvpool.layout.types import MAX_INT

CALL_RUNS = 1023
"""Runs per call, and one to poll. More than 1024 would wait in a second queue, where waiting for a
second is an error.
"""
POLLED_BYTES = 1 << 20
"""Shorter reads end before a pause is worth it."""
MAX_REGIONS = 1 << 16


class MooncakeMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A peer's endpoint address, the token by which it is recognised, and its registered ranges."""

    protocol: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
    token: bytes
    ranges: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_REGIONS)]


@dataclass(eq=False, slots=True, kw_only=True)
class MooncakeReader(BlockingReader):
    """`obtain` returns the `TransferEngine`; with `shared` other peers use it too, and it is not
    destroyed. With `polls` it leaves the core to others while Mooncake's threads read. `scratch`
    receives the peer's token and must live as long as the `TransferEngine`.
    """

    undestroyed = "all peers share one TransferEngine."

    owner: MooncakeMetadata
    scratch: np.ndarray
    obtain: Callable[[], Any]
    shared: bool
    scope: AbstractContextManager[Any]
    polls: bool
    engine: Any = None

    @property
    def address(self) -> str:
        """Where the peer's `TransferEngine` answers."""
        return f"{self.owner.hostname}:{self.owner.port}"

    def start(self) -> None:
        """Checks that the peer answers, and no other process."""
        self.engine = self.obtain()
        if not self.owner.token:
            return
        base, nbytes = self.scratch.ctypes.data, self.scratch.nbytes
        register_ranges(self.engine, [(base, nbytes)])
        if not fetch(self.engine, self.address, [[self.owner.token_at], [base], [nbytes]]):
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
        polled = self.polls and bool(call[2].sum() >= POLLED_BYTES)
        if not fetch(self.engine, self.address, call.tolist(), polled=polled):
            raise TransferError(
                f"Mooncake cannot read {call.shape[1]} runs from {self.address}: the peer is dead, "
                "stopped or out of reach. See Mooncake's log on stderr."
            )

    def end(self) -> bool:
        """Lets go of a shared `TransferEngine`, and destroys another."""
        if self.engine is None or self.shared:
            self.engine = None
            return False
        gone = weakref.ref(self.engine)
        hasten(self.engine)
        self.engine = None
        return gone() is None
