"""Why a destination cannot be filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import PeerError
from kvpool.layout.text import by_layers


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one region of the destination cannot be filled, and what would make it work. `sources`
    are the source ranks that hold the region and that it is about.
    """

    owner: str
    layer: int
    role: str
    sentence: str
    sources: tuple[int, ...] = ()


class IncompatibleLayouts(PeerError, ValueError):
    """The destination cannot be filled from these sources; `reasons` lists all reasons."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        lines = [f"  {line}" for line in self.lines()]
        count = f"{len(lines)} reason{'s' if len(lines) > 1 else ''}"
        super().__init__("\n".join([f"{count}.", *lines]))

    def lines(self) -> list[str]:
        """One sentence for all layers that share owner, role and reason."""
        return by_layers(((r.owner, r.layer, r.role), f": {r.sentence}") for r in self.reasons)
