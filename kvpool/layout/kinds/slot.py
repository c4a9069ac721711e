"""Slots: one state a request, without entries, such as that of linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout.kinds.kind import check_whole, one_item_kind
from kvpool.layout.types import need

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space


def _check(space: Space) -> None:
    numbers = space.entries_per_item, space.tokens_per_entry, space.window_step
    need(
        numbers == (1, 1, 1) and space.window is None,
        f"space {space.name}",
        "a slot has no entries: entries_per_item, tokens_per_entry and window_step are 1, window "
        "None.",
    )
    check_whole(space)


SLOT = one_item_kind(
    has_entries=False,
    check=_check,
    wraps=False,
    words=lambda space: "one item a request",
    alive=lambda space, tokens: range(min(tokens, 1)),
)
"""The state after a request's last token, which counts as one entry."""
