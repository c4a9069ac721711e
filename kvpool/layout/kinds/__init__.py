"""Kinds of spaces, by the name that a layout calls them. A kind is one file of this folder and its
name here; other code asks for its traits and calls its functions.
"""

from __future__ import annotations

from typing import Literal

from kvpool.layout.kinds.kind import SpaceKind
from kvpool.layout.kinds.paged import PAGED
from kvpool.layout.kinds.ring import RING
from kvpool.layout.kinds.slot import SLOT

KindName = Literal["paged", "slot", "ring"]
KINDS: dict[str, SpaceKind] = {"paged": PAGED, "slot": SLOT, "ring": RING}

__all__ = ["KINDS", "KindName", "SpaceKind"]
