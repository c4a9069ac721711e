"""Which state a request still has of fewer tokens than it had."""

from __future__ import annotations

import numpy as np

from kvpool.layout import Space
from kvpool.layout.grid import Ints


def alive_start(space: Space, tokens: Ints) -> Ints:
    """The first live entry of requests of `tokens` `[B]` tokens."""
    if space.kind == "slot" or space.window is None:
        return np.zeros_like(tokens)
    step = space.window_step
    return np.maximum(tokens // space.tokens_per_entry // step * step - space.window, 0)


def overwritten(space: Space, before: Ints, after: Ints, lost: Ints) -> Ints:
    """How many of the first entries a ring has no more, that lacked `lost` `[B]`, has taken
    `before` `[B]` tokens since and is to have `after` `[B]` of them: 0 without tokens.
    """
    per = space.tokens_per_entry
    gone = np.minimum(before // per - space.entries_per_item, after // per)
    return np.where(after > 0, np.maximum(gone, lost), 0)


def need_kept(space: Space, before: Ints, after: Ints, received: Ints, gone: Ints) -> None:
    """Raises ValueError unless requests of `before` `[B]` tokens, of which entries before `gone`
    `[B]` were freed or overwritten, have all that is alive of `after` `[B]`; after `received` `[B]`
    tokens were received, entries that were dead then never came.
    """
    if space.kind == "slot":
        if (where := np.flatnonzero(after > 0)).size:
            at = where[0]
            raise ValueError(
                f"space {space.name}: a slot holds the state after {before[at]} tokens, and there "
                f"is no checkpoint of that after {after[at]}. Fork the request before it takes "
                "tokens that may be rejected."
            )
        return
    start, stop = alive_start(space, after), after // space.tokens_per_entry
    alive = start < stop
    why = "left the window and were freed. Truncate before the next tokens are extended"
    if space.kind == "ring":
        why = (
            f"were overwritten in the ring of {space.entries_per_item}. Build the pool with longer "
            "rings, as for speculation"
        )
    never = "were dead when the request was received, and did not come. Keep what was received"
    for end, reason in ((gone, why), (alive_start(space, received), never)):
        where = np.flatnonzero(alive & (start < end))
        if where.size:
            at = where[0]
            raise ValueError(
                f"space {space.name}: of the entries that are alive at {after[at]} tokens, "
                f"{start[at]} to {min(end[at], stop[at]) - 1} {reason}."
            )
