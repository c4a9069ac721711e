"""A peer that is given up, until none of its bytes can land any more."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from disagg.engines.base import TransferError
from disagg.runtime.reads.begun import BegunReads
from disagg.runtime.reads.context import ReadContext

log = logging.getLogger("disagg")


@dataclass(eq=False, slots=True)
class Fence:
    """`reads` are those whose bytes may land until it is passed: the one that has failed, and
    others from the same peer. `since` is when the peer was given up.
    """

    peer: Any
    reads: list[BegunReads]
    since: float

    def passed(self, context: ReadContext) -> bool:
        """Whether no byte of `reads` can land. A read of which that can never be certain leaves
        them: it stays in quarantine. Rooms that have not failed do so if it takes too long.
        """
        waits = False
        for begun in list(self.reads):
            try:
                waits |= any(flight.copying() for flight in begun.in_flight)
            except Exception as error:
                self._quarantine(context, begun, error)
        try:
            passed = not waits and context.engine.fence(self.peer, 0)
        except Exception as error:
            for begun in list(self.reads):
                self._quarantine(context, begun, error)
            return True
        if not passed and context.clock() - self.since > context.timeout:
            late = TransferError(
                f"its peer was given up {context.timeout:g} s ago, and bytes may still land."
            )
            for begun in self.reads:
                self._fail(context, begun, late)
        return passed

    def _fail(self, context: ReadContext, begun: BegunReads, error: Exception) -> None:
        """Its rooms fail, unless they have."""
        if begun.problem is None:
            begun.fail(context, begun.apart or error)

    def _quarantine(self, context: ReadContext, begun: BegunReads, error: Exception) -> None:
        log.error("pages stay in quarantine, a read cannot be ended for sure: %s", error)
        self._fail(context, begun, error)
        context.stage.mark_lost(len(begun.buffers))
        context.quarantined.extend(begun.reads)
        self.reads.remove(begun)
