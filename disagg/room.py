"""What both sides say of a room: its state, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room failed, and on whose side (`prefill` or `decode`)."""

    side: str
    reason: str

    def __str__(self) -> str:
        return f"{self.side}: {self.reason}"
