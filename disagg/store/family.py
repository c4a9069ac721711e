"""The namespaces of a family: those that differ in the formats of their state alone, so that
an engine that converts reads in all of them.
"""

from __future__ import annotations

import hashlib
import json

from disagg.store.floors.base import BeyondEnd, Floor, Listed, NotThere
from disagg.store.geometry import DIGEST_BYTES
from kvpool.layout.types import SCALE

MAX_TEXT = 1 << 16
"""Bytes of a namespace's text."""
MAX_NAMESPACES = 64
"""Of a family: others are not read."""
_HEX = frozenset("0123456789abcdef")


def family_of(text: str) -> str:
    """The name of the family of a namespace, whose name is the digest of `text`."""
    description = json.loads(text)
    state = {
        role: sorted({(elements, per) for _, elements, per, _ in forms})
        for role, forms in description["state"].items()
        if not role.endswith(SCALE)
    }
    family = json.dumps({**description, "state": state}, separators=(",", ":"))
    return hashlib.blake2b(family.encode(), digest_size=DIGEST_BYTES).hexdigest()


def member_name(family: str, namespace: str) -> str:
    """The name of the object by which a namespace belongs to a family."""
    return f"{family}/namespace/{namespace}"


def is_member(floor: Floor, listed: Listed) -> bool:
    """Whether an object's name is the digest of its text. Raises FloorError."""
    name = listed.name.rpartition("/")[2]
    if len(name) != 2 * DIGEST_BYTES or not _HEX.issuperset(name) or listed.size > MAX_TEXT:
        return False
    try:
        with floor.read(listed.name, [(0, listed.size)]) as (data,):
            text = bytes(data)
    except (NotThere, BeyondEnd):
        return False
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest() == name


class NamespaceFamily:
    """The namespaces of a family on a floor. Each has an object of its name, which is created once
    and holds its text. Not thread-safe.
    """

    def __init__(self, floor: Floor, namespace: str, text: str) -> None:
        self._floor, self._namespace, self._text = floor, namespace, text
        self.name = family_of(text)
        self._said = False
        self._known: dict[str, bool] = {}
        """Whether what has that name is a namespace of this family."""

    def join(self) -> None:
        """Lists this namespace, if that was not done. Raises FloorError."""
        if not self._said:
            self._floor.create(member_name(self.name, self._namespace), [self._text.encode()])
            self._said = True

    def others(self) -> list[str]:
        """The other namespaces. Raises FloorError."""
        for listed in self._floor.list(f"{self.name}/namespace"):
            name = listed.name.rpartition("/")[2]
            if name not in self._known and len(self._known) < MAX_NAMESPACES:
                self._known[name] = name != self._namespace and is_member(self._floor, listed)
        return [name for name, belongs in self._known.items() if belongs]
