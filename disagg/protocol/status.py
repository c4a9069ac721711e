"""What both sides say of a room: its state, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class KVPoll(IntEnum):
    """State of one room on one side."""

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


Kind = Literal["abort", "aux", "device", "digest", "lease", "lost", "protocol", "read", "refused"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room failed, and on whose side (`prefill` or `decode`).

    `kind`, of few words, is for counting: what the other side has aborted is an `abort` here.
    """

    side: str
    reason: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.side}: {self.reason}"
