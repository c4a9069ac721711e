"""Which chunks of a prefix a floor has, of geometries that all ranks of this engine can read."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.protocol.messages import Convention
from disagg.store.catalogue import Catalogue
from disagg.store.chunks import KINDS, kind_of
from disagg.store.family import NamespaceFamily
from disagg.store.floors.base import Floor
from disagg.store.geometry import Geometry, readable
from disagg.store.known import KnownObjects
from disagg.store.objects import ObjectId
from kvpool.layout import PoolLayout

REFRESH_SECONDS = 5.0
"""After which a lookup looks for new geometries."""
FIRST_CHUNKS = 4
"""Chunks that are looked for at first; then four times as many, until one is not there."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix that can be read: `sources` are kind, chunk and geometry of all objects
    that it needs.
    """

    tokens: int
    sources: tuple[tuple[str, int, bytes], ...] = ()


class Lookup:
    """Finds prefixes. Threads take turns: what one has learned of geometries the next one knows."""

    def __init__(
        self,
        floor: Floor,
        namespace: str,
        ranks: Sequence[PoolLayout],
        *,
        conventions: Mapping[str, Convention],
        chunk_tokens: int,
        known: KnownObjects,
        family: NamespaceFamily,
        cast: bool | Collection[str] = False,
    ) -> None:
        self._floor, self._namespace, self._tokens = floor, namespace, chunk_tokens
        self._family, self._cast = family, cast
        self._agreed = dict(conventions)
        """What this engine and the writers that it reads from say."""
        shapes = {rank.fingerprint(): rank for rank in ranks}
        self._ranks = tuple(shapes.values())
        self._spaces = [space for rank in self._ranks for space in rank.spaces]
        kinds = {kind_of(r.space_of(region)) for r in self._ranks for region in r.regions}
        self._kinds = [kind for kind in KINDS if kind in kinds]
        self._catalogues = {namespace: Catalogue(floor, namespace)}
        """By namespace: its own, and with `cast` those of its family."""
        self.usable: dict[bytes, Geometry] = {}
        self.unusable: dict[bytes, str] = {}
        """Why this engine cannot read a geometry, by digest."""
        self._lock = threading.Lock()
        self._refreshed = -REFRESH_SECONDS
        self._known = known

    def geometry(self, digest: bytes) -> Geometry:
        """A geometry that another process has named. Raises ValueError."""
        if digest not in self.usable:
            self.refresh(0.0)
        if digest not in self.usable:
            why = self.unusable.get(digest, "the catalogue does not have it.")
            raise ValueError(f"geometry {digest.hex()[:16]}: {why}")
        return self.usable[digest]

    def refresh(self, seconds: float = REFRESH_SECONDS) -> None:
        """Reads the catalogue, if it was read more than so many seconds ago."""
        with self._lock:
            if time.monotonic() - self._refreshed < seconds:
                return
            if self._cast:
                for namespace in self._family.others():
                    self._catalogues.setdefault(namespace, Catalogue(self._floor, namespace))
            for catalogue in self._catalogues.values():
                for geometry in catalogue.refresh():
                    self.judge(geometry)
            self._refreshed = time.monotonic()

    def publish(self, geometry: Geometry) -> None:
        """Publishes this engine's geometry, if it is not there. Raises CatalogueFull."""
        catalogue = self._catalogues[self._namespace]
        with self._lock:
            if geometry.digest in catalogue.geometries:
                return
            catalogue.publish(geometry)
            self._family.join()
            for published in list(catalogue.geometries.values()):
                self.judge(published)

    def find(self, keys: Sequence[bytes], step: int = 1) -> Hit:
        """The longest prefix of chunks `keys` that a floor holds whole, and whose number of
        tokens is a multiple of `step`.
        """
        self.refresh()
        places: dict[str, dict[int, bytes]] = {kind: {} for kind in self._kinds}
        count = len(keys)
        if "full" in places:
            start, size = 0, FIRST_CHUNKS
            while start < count:
                stop = min(count, start + size)
                self._locate("full", keys, range(start, stop), places["full"])
                if any(chunk not in places["full"] for chunk in range(start, stop)):
                    break
                start, size = stop, 4 * size
            count = next((c for c in range(count) if c not in places["full"]), count)
        for kind in self._kinds:
            if kind != "full":
                self._locate(kind, keys, range(count), places[kind])
        for end in range(count, 0, -1):
            if end * self._tokens % step:
                continue
            needed = self._needed(end)
            if all(chunk in places[kind] for kind, chunk in needed):
                sources = tuple((kind, chunk, places[kind][chunk]) for kind, chunk in needed)
                return Hit(end * self._tokens, sources)
        return Hit(0)

    def _needed(self, end: int) -> list[tuple[str, int]]:
        """Kind and chunk of what a prefix of `end` chunks needs."""
        total = end * self._tokens
        needed = [("full", chunk) for chunk in range(end)] if "full" in self._kinds else []
        if "window" in self._kinds:
            starts = [
                space.alive_in_request(total).start * space.tokens_per_entry
                for space in self._spaces
                if kind_of(space) == "window"
            ]
            needed += [("window", chunk) for chunk in range(min(starts) // self._tokens, end)]
        if "state" in self._kinds:
            needed.append(("state", end - 1))
        return needed

    def _locate(
        self, kind: str, keys: Sequence[bytes], chunks: range, places: dict[int, bytes]
    ) -> None:
        """Notes for each chunk the first geometry with all parts."""
        # state that needs no conversion comes first
        others_last = sorted(
            self.usable.items(), key=lambda each: each[1].namespace != self._namespace
        )
        for digest, geometry in others_last:
            left = [chunk for chunk in chunks if chunk not in places]
            parts = geometry.with_kind(kind)
            names = [
                ObjectId(kind=kind, key=keys[chunk], geometry=digest, part=part, chunk=chunk).name(
                    geometry.namespace
                )
                for chunk in left
                for part in parts
            ]
            if names:
                on_floor = self._floor.exists(names)
                self._known.absent(name for name, is_there in zip(names, on_floor) if not is_there)
                sound = [not self._known.is_damaged(name) for name in names]
                present = (np.array(on_floor) & sound).reshape(len(left), len(parts))
                places.update({left[n]: digest for n in np.flatnonzero(present.all(axis=1))})

    def judge(self, geometry: Geometry) -> None:
        """Notes whether this engine can read a geometry."""
        digest = geometry.digest
        if digest in self.usable or digest in self.unusable:
            return
        try:
            for rank in self._ranks:
                readable(geometry, rank, self._agreed, cast=self._cast)
            self.usable[digest] = geometry
            # chunks of writers that differ in what this engine does not say must not meet
            self._agreed = {**geometry.conventions, **self._agreed}
        except ValueError as error:
            self.unusable[digest] = str(error)
