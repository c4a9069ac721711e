"""What has ended on a rank since its engine asked last."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.protocol.codec import Aux
from disagg.protocol.status import Failure


@dataclass(slots=True)
class Results:
    """Requests whose pages may be reused (`sent`), whose rooms have ended (`received`), and those
    of them whose state did not come (`failed`). `why` a room has failed; `aux` that has come.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    why: dict[str, Failure] = field(default_factory=dict)
    aux: dict[str, Aux] = field(default_factory=dict)
