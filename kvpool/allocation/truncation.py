"""Which state a request still has of fewer tokens than it had."""

from __future__ import annotations

import numpy as np

from kvpool.layout import Space
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS


def alive_start(space: Space, tokens: Ints) -> Ints:
    """The first live entry of requests of `tokens` `[B]` tokens."""
    if space.window is None:
        return np.zeros_like(tokens)
    step = space.window_step
    return np.maximum(tokens // space.tokens_per_entry // step * step - space.window, 0)


def first_kept(space: Space, entries: Ints, tokens: Ints, lost: Ints) -> Ints:
    """The first entry that the items of `entries` still have, of requests of `tokens` tokens that
    lack those before `lost`; of rings, whose later entries overwrite earlier ones.
    """
    size = space.entries_per_item if space.ring else MAX_TOKENS
    stop = (entries // size + 1) * size
    written = np.minimum(tokens // space.tokens_per_entry, stop)
    first: Ints = np.maximum(written - space.steps, np.where(lost <= stop, lost, 0))
    return first


def overwritten(space: Space, before: Ints, after: Ints, lost: Ints) -> Ints:
    """The entry before which a ring has none of its last item's, that lacked those before `lost`
    `[B]`, has taken `before` `[B]` tokens since and is to have `after` `[B]` of them: 0 without
    tokens.
    """
    stop = after // space.tokens_per_entry
    last = np.maximum(stop - 1, 0)
    size = space.entries_per_item if space.ring else MAX_TOKENS
    gone = np.minimum(first_kept(space, last, before, lost), stop)
    return np.where(gone > last // size * size, gone, 0)


def first_whole(space: Space, received: int) -> int:
    """The number of the first item of which nothing is missing that later tokens may need: entries
    that were dead at `received` tokens never came. Of a page's ring, what is alive at its end.
    """
    start = int(alive_start(space, np.array([received]))[0])
    if space.ring and start:
        return -(-(start + (space.window or 0)) // space.entries_per_item) - 1
    return -(-start // space.entries_per_item)


def need_kept(space: Space, before: Ints, after: Ints, received: Ints, gone: Ints) -> None:
    """Raises ValueError unless requests of `before` `[B]` tokens, of which entries before `gone`
    `[B]` were freed or overwritten, have all that is alive of `after` `[B]`; after `received` `[B]`
    tokens were received, entries that were dead then never came.
    """
    if not space.has_entries:
        if (rows := np.flatnonzero((after > 0) & (after < before))).size:
            row = rows[0]
            raise ValueError(
                f"space {space.name}: a slot holds the state after {before[row]} tokens, and there "
                f"is no checkpoint of that after {after[row]}. Fork the request before it takes "
                "tokens that may be rejected."
            )
        return
    start, stop = alive_start(space, after), after // space.tokens_per_entry
    alive = start < stop
    why = "left the window and were freed. Truncate before the next tokens are extended"
    if space.wraps:
        why = (
            f"were overwritten in the ring of {space.steps}. Build the pool with longer "
            "rings, as for speculation"
        )
    never = "were dead when the request was received, and did not come. Keep what was received"
    for end, reason in ((gone, why), (alive_start(space, received), never)):
        rows = np.flatnonzero(alive & (start < end))
        if rows.size:
            row = rows[0]
            raise ValueError(
                f"space {space.name}: of the entries that are alive at {after[row]} tokens, "
                f"{start[row]} to {min(end[row], stop[row]) - 1} {reason}."
            )
