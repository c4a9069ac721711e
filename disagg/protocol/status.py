"""The phases of a room, which may follow which, and what callers see of them.

A room is one request's hand-off: vLLM's and NIXL's request id, SGLang's bootstrap_room. Each side
keeps a phase of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
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


class Phase(Enum):
    """Where a room stands on one side."""

    HANDSHAKE = "handshake"
    """Decode waits until every rank has answered the hello. Prefill has chunks that no decode has
    asked for.
    """
    REQUESTED = "requested"
    """Decode has asked every rank; no chunk is ready. Prefill was asked before it has computed."""
    TRANSFERRING = "transferring"
    """Decode reads chunks that are ready. Prefill was asked, and computes and serves chunks."""
    VERIFYING = "verifying"
    """Decode has read everything and compares digests. Prefill stays in TRANSFERRING meanwhile."""
    RELEASING = "releasing"
    """Decode has told every rank that it has read everything, and waits for their acks. Prefill
    stays in TRANSFERRING until every reader has told it.
    """
    SUCCESS = "success"
    """Every rank has acked that its pages stayed leased. On prefill every reader is done, and its
    pages are free.
    """
    FAILED = "failed"
    """Decode's pages stay leased while a read may still write to them. Prefill's are free."""

    @property
    def poll(self) -> KVPoll:
        """What callers see."""
        return POLL[self]

    def to(self, phase: Phase) -> Phase:
        """The phase that follows; raises RuntimeError if it may not."""
        if phase not in TRANSITIONS[self]:
            raise RuntimeError(f"a room cannot go from {self.name} to {phase.name}.")
        return phase


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # prefill skips REQUESTED where chunks come before the request
    Phase.HANDSHAKE: frozenset({Phase.REQUESTED, Phase.TRANSFERRING, Phase.FAILED}),
    Phase.REQUESTED: frozenset({Phase.TRANSFERRING, Phase.FAILED}),
    # prefill goes to SUCCESS, decode verifies (with `verify="checksum"`) and releases first
    Phase.TRANSFERRING: frozenset(
        {Phase.VERIFYING, Phase.RELEASING, Phase.SUCCESS, Phase.FAILED},
    ),
    Phase.VERIFYING: frozenset({Phase.RELEASING, Phase.FAILED}),
    Phase.RELEASING: frozenset({Phase.SUCCESS, Phase.FAILED}),
    Phase.SUCCESS: frozenset(),
    Phase.FAILED: frozenset(),
}

POLL: Mapping[Phase, KVPoll] = {
    Phase.HANDSHAKE: KVPoll.Bootstrapping,
    Phase.REQUESTED: KVPoll.WaitingForInput,
    Phase.TRANSFERRING: KVPoll.Transferring,
    Phase.VERIFYING: KVPoll.Transferring,
    Phase.RELEASING: KVPoll.Transferring,
    Phase.SUCCESS: KVPoll.Success,
    Phase.FAILED: KVPoll.Failed,
}

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
