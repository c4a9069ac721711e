"""What a floor holds, by namespace, geometry and kind: names and sizes alone tell it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from disagg.store.catalogue import read_geometry
from disagg.store.chunks import KINDS
from disagg.store.floors.base import Floor, Listed, NotThere
from disagg.store.geometry import Geometry, namespace_of

_OBJECT = re.compile(r"([0-9a-f]{32})/([0-9a-f]{64})/([0-9a-f]{32})\.([0-9]{1,4})\.([a-z]+)")
_GEOMETRY = re.compile(r"([0-9a-f]{32})/geometry/([0-9]{2})")
_MEMBER = re.compile(r"([0-9a-f]{32})/namespace/([0-9a-f]{32})")
MOST_FOREIGN = 8
"""Names of what is no store's that are kept."""


@dataclass(frozen=True, slots=True)
class StoredName:
    """What the name of an object says."""

    namespace: str
    key: bytes
    geometry: bytes
    part: int
    kind: str


def object_name(name: str) -> StoredName | None:
    """None for what is not named as an object."""
    match = _OBJECT.fullmatch(name)
    if match is None or match[5] not in KINDS or (len(match[4]) > 1 and match[4][0] == "0"):
        return None
    key, geometry = bytes.fromhex(match[2]), bytes.fromhex(match[3])
    return StoredName(
        namespace=match[1], key=key, geometry=geometry, part=int(match[4]), kind=match[5]
    )


def geometry_name(name: str) -> tuple[str, int] | None:
    """Namespace and number of a geometry; None for what is not named as one."""
    match = _GEOMETRY.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def is_member_name(name: str) -> bool:
    """Whether it is named as a namespace in the list of its family."""
    return _MEMBER.fullmatch(name) is not None


@dataclass(slots=True)
class Amount:
    """Objects: how many, their bytes, and when the first and the last of them were used, in seconds
    since 1970, as far as the floor knows.
    """

    objects: int = 0
    nbytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def count_object(self, listed: Listed) -> None:
        self.objects += 1
        self.nbytes += listed.size
        if listed.modified is not None:
            self.oldest = min(listed.modified, self.oldest or listed.modified)
            self.newest = max(listed.modified, self.newest or listed.modified)

    def join(self, other: Amount) -> None:
        self.objects += other.objects
        self.nbytes += other.nbytes
        self.oldest = min(filter(None, (self.oldest, other.oldest)), default=None)
        self.newest = max(filter(None, (self.newest, other.newest)), default=None)


@dataclass
class Held:
    """What a namespace holds. `geometries` and `refused` (why there is none) are by number;
    `amounts` by geometry and kind.
    """

    namespace: str
    geometries: dict[int, Geometry] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    amounts: dict[tuple[bytes, str], Amount] = field(default_factory=dict)
    keys: set[bytes] = field(default_factory=set)
    """Of its chunks."""

    def number(self, digest: bytes) -> int | None:
        """The number of a geometry in the catalogue."""
        return next((n for n, g in self.geometries.items() if g.digest == digest), None)

    def geometry(self, digest: bytes) -> Geometry | None:
        number = self.number(digest)
        return None if number is None else self.geometries[number]

    @property
    def text(self) -> dict[str, Any] | None:
        """What all engines of the namespace have in common."""
        geometry = next(iter(self.geometries.values()), None)
        return None if geometry is None else json.loads(namespace_of(geometry)[1])

    @property
    def chunk_tokens(self) -> int | None:
        return next((geometry.chunk_tokens for geometry in self.geometries.values()), None)

    def amount(self, digest: bytes | None = None, kind: str | None = None) -> Amount:
        """Of a geometry, of a kind; of all without either."""
        total = Amount()
        for (of, what), amount in self.amounts.items():
            if digest in (None, of) and kind in (None, what):
                total.join(amount)
        return total

    def digests(self) -> list[bytes]:
        """Geometries in the catalogue's order, and those of objects that it does not have."""
        catalogued = [geometry.digest for geometry in self.geometries.values()]
        return [*dict.fromkeys([*catalogued, *(digest for digest, _ in self.amounts)])]


@dataclass
class Inventory:
    """What a floor holds. `foreign` is what is not named as a store's, with some names."""

    namespaces: dict[str, Held] = field(default_factory=dict)
    foreign: Amount = field(default_factory=Amount)
    foreign_names: list[str] = field(default_factory=list)

    def amount(self) -> Amount:
        total = Amount()
        for namespace in self.namespaces.values():
            total.join(namespace.amount())
        return total


def take(floor: Floor, prefix: str = "") -> Inventory:
    """Lists a floor, and reads its catalogues. Raises FloorError."""
    return taken(floor, floor.list(prefix))


def taken(floor: Floor, entries: Iterable[Listed]) -> Inventory:
    """As `take`, of objects that are listed."""
    inventory = Inventory()
    for entry in entries:
        name, numbered = object_name(entry.name), geometry_name(entry.name)
        if name is not None:
            namespace = inventory.namespaces.setdefault(name.namespace, Held(name.namespace))
            namespace.amounts.setdefault((name.geometry, name.kind), Amount()).count_object(entry)
            namespace.keys.add(name.key)
        elif numbered is not None:
            namespace = inventory.namespaces.setdefault(numbered[0], Held(numbered[0]))
            namespace.refused[numbered[1]] = "not read."
        elif not is_member_name(entry.name):
            inventory.foreign.count_object(entry)
            if len(inventory.foreign_names) < MOST_FOREIGN:
                inventory.foreign_names.append(entry.name)
    for namespace in inventory.namespaces.values():
        read_catalogue(floor, namespace)
    return inventory


def read_catalogue(floor: Floor, namespace: Held) -> None:
    """Reads the geometries whose numbers are known."""
    numbers, namespace.refused = sorted(namespace.refused), {}
    for number in numbers:
        try:
            namespace.geometries[number] = read_geometry(floor, namespace.namespace, number)
        except NotThere:
            continue
        except ValueError as error:
            namespace.refused[number] = str(error)


def objects_of(entries: Iterable[Listed]) -> Iterator[tuple[Listed, StoredName]]:
    """Those that are named as objects."""
    for entry in entries:
        name = object_name(entry.name)
        if name is not None:
            yield entry, name
