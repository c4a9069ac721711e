"""What callers see of a room, and why rooms fail.

A room is one request's hand-off: vLLM's and NIXL's request id, SGLang's bootstrap_room. Each side
keeps a state of its own; `phases` says how it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class KVPoll(IntEnum):
    """State of one room on one side, as `poll` gives it."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    def __str__(self) -> str:
        return self.name

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self in (KVPoll.Failed, KVPoll.Success)


Side = Literal["prefill", "decode"]
FailureKind = Literal[
    "abort", "aux", "device", "digest", "lease", "lost", "protocol", "read", "refused", "timeout"
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room failed, and on which side.

    `kind` is for counting; an abort of the other side is an `abort` here.
    """

    side: Side
    reason: str
    kind: FailureKind

    def __str__(self) -> str:
        return f"{self.side}: {self.reason}"
