"""The geometries of a namespace, in numbered objects that are created and never changed."""

from __future__ import annotations

import struct

from disagg.store.floors.base import BeyondEnd, Floor
from disagg.store.geometry import MAX_BYTES, Geometry, namespace_of

LENGTH = struct.Struct("<Q")
"""What precedes a geometry's bytes: how many there are."""
MAX_GEOMETRIES = 64
"""Of a namespace: an engine with another one reads and writes nothing there."""


class CatalogueFull(ValueError):
    """A namespace has as many geometries as it can have."""


def catalogue_name(namespace: str, number: int) -> str:
    """The name of a geometry on a floor."""
    return f"{namespace}/geometry/{number:02}"


def read_geometry(floor: Floor, namespace: str, number: int) -> Geometry:
    """The geometry of that number. Raises ValueError for what is none of this namespace, and
    FloorError.
    """
    name = catalogue_name(namespace, number)
    try:
        with floor.read(name, [(0, LENGTH.size)]) as (start,):
            (size,) = LENGTH.unpack(start)
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes: at most {MAX_BYTES} are read.")
        with floor.read(name, [(LENGTH.size, LENGTH.size + size)]) as (data,):
            geometry = Geometry.decode(bytes(data))
    except BeyondEnd as error:
        raise ValueError(str(error)) from None
    if (belongs := namespace_of(geometry)[0]) != namespace:
        raise ValueError(f"it belongs to namespace {belongs}.")
    return geometry


class Catalogue:
    """The geometries by digest, as far as they were read. Not thread-safe."""

    def __init__(self, floor: Floor, namespace: str) -> None:
        self._floor, self._namespace = floor, namespace
        self.geometries: dict[bytes, Geometry] = {}
        self.refused: dict[int, str] = {}
        """Why what lies under a number is none, by number."""
        self._next = 0

    def refresh(self) -> list[Geometry]:
        """Reads those that are new, in order."""
        new_geometries: list[Geometry] = []
        while self._next < MAX_GEOMETRIES and self._floor.exists([self._name(self._next)])[0]:
            geometry = self._read(self._next)
            self._next += 1
            if geometry is not None and geometry.digest not in self.geometries:
                self.geometries[geometry.digest] = geometry
                new_geometries.append(geometry)
        return new_geometries

    def publish(self, geometry: Geometry) -> None:
        """Publishes a geometry, unless it is there. Raises CatalogueFull."""
        self.refresh()
        while geometry.digest not in self.geometries:
            if self._next == MAX_GEOMETRIES:
                raise CatalogueFull(
                    f"this namespace has {MAX_GEOMETRIES} geometries. Delete it, or what no engine "
                    "uses any more: kvpool store gc."
                )
            data = [LENGTH.pack(len(geometry.encoded)), geometry.encoded]
            if self._floor.create(self._name(self._next), data):
                self.geometries[geometry.digest] = geometry
                self._next += 1
            else:  # another writer was quicker: perhaps with the same
                self.refresh()

    def _name(self, number: int) -> str:
        return catalogue_name(self._namespace, number)

    def _read(self, number: int) -> Geometry | None:
        try:
            return read_geometry(self._floor, self._namespace, number)
        except ValueError as error:
            self.refused[number] = str(error)
            return None
