"""Reads from one peer by an `IOEngine` of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.mori.package import TOKEN_BYTES, MoriIO, MoriRuns, mori_io
from disagg.engines.ranges import Ranges
from disagg.engines.threaded import GIVEN_UP, BlockingReader
from kvpool.layout.grid import Ints

MAX_REGIONS = 1 << 16
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


@dataclass(eq=False, kw_only=True)
class MoriReader(BlockingReader):
    """`obtain` makes the `IOEngine`; `own` are its registrations, `ranges` the peer's, whose
    `MemoryDesc`s are in `memory` by base. `proven` are the bases of both sides between which the
    peer was read and no other process.
    """

    undestroyed = "an object still refers to MoRI's IOEngine."

    engine: Any
    token: bytes
    token_base: int
    memory: dict[int, Any]
    ranges: Ranges
    own: Ranges
    obtain: Callable[[], MoriIO]
    io: MoriIO = field(init=False)
    proven: set[tuple[int, int]] = field(default_factory=set)
    given_up: bool = False

    @property
    def address(self) -> str:
        """Where the peer's `IOEngine` listens."""
        return f"{self.engine.host}:{self.engine.port}"

    def start(self) -> None:
        """Makes the `IOEngine`. The first read fails if the peer cannot be reached."""
        self.io = self.obtain()
        self.io.meet(self.engine)

    def calls(self, rows: Ints) -> list[list[MoriRuns]]:
        """One call: its runs by pair of registrations. Each run lies in one pair."""
        numbers = [
            np.searchsorted(side.starts, pointers, side="right") - 1
            for side, pointers in ((self.ranges, rows[0]), (self.own, rows[1]))
        ]
        call = []
        for src_number, dst_number in np.unique(numbers, axis=1).T:
            src_base, dst_base = self.ranges.starts[src_number], self.own.starts[dst_number]
            runs = (numbers[0] == src_number) & (numbers[1] == dst_number)
            src, dst, nbytes = (rows[:, runs] - [[src_base], [dst_base], [0]]).tolist()
            call.append(
                MoriRuns(
                    src_base=int(src_base), dst_base=int(dst_base), src=src, dst=dst, nbytes=nbytes
                )
            )
        return [call]

    def fetch(self, call: list[MoriRuns]) -> None:
        """Posts reads and waits for them. A read between registrations that MoRI has not connected
        before is proven by a read of the token behind it: the process that answers with the token
        has answered at this address all along.
        """
        unproven = {(runs.dst_base, runs.src_base) for runs in call} - self.proven
        statuses = []
        for runs in call:
            statuses.append(self.io.post(self.memory[runs.src_base], runs))
            if statuses[-1].Failed():
                break  # nothing is posted behind it
        else:
            if unproven:
                nbytes = [TOKEN_BYTES]  # the peer's token lies behind this side's own
                token = MoriRuns(
                    src_base=self.token_base,
                    dst_base=self.io.token_base,
                    src=[0],
                    dst=nbytes,
                    nbytes=nbytes,
                )
                statuses.append(self.io.post(self.memory[self.token_base], token))
        for status in statuses:
            while status.InProgress() and not self.given_up:
                status.WaitFor(WAIT_MILLISECONDS)
            if not status.Succeeded():
                reason = status.Message() if status.Failed() else GIVEN_UP
                raise TransferError(f"MoRI cannot read from {self.address}: {reason}")
        self.io.spend()
        if unproven and bytes(self.io.tokens[1]) != self.token:
            raise TransferError(
                f"another process answers at {self.address}. Connect with the peer's new metadata."
            )
        self.proven |= unproven

    def give_up(self) -> None:
        """Ends the wait for a read."""
        self.given_up = True

    def end(self) -> bool:
        """Destroys the `IOEngine`."""
        return not hasattr(self, "io") or self.io.destroy()  # it has not, if `start` failed


def reader_of(metadata: bytes, own: Ranges, obtain: Callable[[], MoriIO]) -> MoriReader:
    """The reader of a peer, from its metadata (untrusted). Raises TransferError."""
    api = mori_io()
    try:
        owner = msgspec.msgpack.decode(metadata, type=MoriMetadata)
        engine = api.EngineDesc.unpack(owner.engine)
        token, *memory = (api.MemoryDesc.unpack(m) for m in (owner.token_memory, *owner.memory))
        Ranges.of((desc.data, desc.size) for desc in (token, *memory))
        if any(desc.engine_key != engine.key for desc in (token, *memory)):
            raise ValueError("memory of another engine.")
        if len(owner.token) != TOKEN_BYTES or token.size < TOKEN_BYTES:
            raise ValueError("a token of another size.")
        return MoriReader(
            engine=engine,
            token=owner.token,
            token_base=token.data,
            memory={desc.data: desc for desc in (token, *memory)},
            ranges=Ranges.of((desc.data, desc.size) for desc in memory),
            own=own,
            obtain=obtain,
        )
    except Exception as error:  # msgspec's, and those of C++
        reason = str(error)
    raise TransferError(f"malformed metadata: {reason}")
