"""What a rank knows of the rooms of its requests, and what it tells its engine of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.protocol.aux_values import Aux
from disagg.protocol.peers.link import Link
from disagg.protocol.status import Failure


@dataclass(slots=True)
class Results:
    """Requests whose pages may be reused (`sent`), whose rooms have ended (`received`), and those
    of them whose state did not come (`failed`). `why` a room has failed, on either side; `aux`
    values of those that were received.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    why: dict[str, Failure] = field(default_factory=dict)
    aux: dict[str, Aux] = field(default_factory=dict)


@dataclass(slots=True)
class Sending:
    """A room of prefill."""

    request: str
    ended: bool = False
    """Whether its room has ended, or cannot be offered."""
    finished: bool = False
    """Whether the engine is done with the request."""
    failure: Failure | None = None


@dataclass(slots=True)
class Receiving:
    """A room of decode. An `aborted` one is not called failed."""

    request: str
    link: Link
    aborted: bool = False
