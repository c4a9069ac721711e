"""What an endpoint counts of its peers since it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from disagg.protocol.status import Side

RefusalKind = Literal["breach", "conventions", "engine", "full", "layout", "protocol", "told"]
"""Why a peer was refused: it breaks the protocol (`breach`); the two are set up differently
(`conventions`, `engine`, `layout`, `protocol`); there are too many already (`full`). The side that
is `told` of a refusal does not know the kind: the other side counts it.
"""


@dataclass(slots=True)
class PeerCounts:
    """Refusals, by the side that refuses and the kind; peers that were there and were lost."""

    refusals: Counter[tuple[Side, RefusalKind]] = field(default_factory=Counter)
    losses: int = 0

    def refuse(self, side: Side, kinds: Iterable[RefusalKind]) -> None:
        """Counts one refusal, once under each of its kinds."""
        self.refusals.update((side, kind) for kind in kinds)
