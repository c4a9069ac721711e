"""The prefix trees of a store, as the heads of its objects tell them: a head says which chunk it is
of, its number, and the key of the chunk before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from disagg.store.floors.base import BeyondEnd, Floor, Listed, NotThere
from disagg.store.objects import NO_PARENT, START_BYTES, Damaged, Start, decode_start
from disagg.store.upkeep.inventory import objects_of

READ_AT_ONCE = 16
"""Heads, where each is a round trip."""

Tell = Callable[[str, int], None]
"""What is being done, and how many of it have ended."""


def untold(what: str, done: int) -> None:
    """Reports nothing."""


@dataclass(eq=False, slots=True)
class Chunk:
    """A chunk, with all objects that are named by its key. `number` and `parent` are None where no
    head could be read, for the reason `why`. `used` is when it was last used, in seconds since
    1970, `None` where the floor does not know.
    """

    namespace: str
    key: bytes
    names: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    nbytes: int = 0
    used: float | None = None
    number: int | None = None
    parent: bytes | None = None
    why: str = ""
    children: list[Chunk] = field(default_factory=list)

    def add_object(self, entry: Listed, kind: str) -> None:
        self.names.append(entry.name)
        self.kinds.add(kind)
        self.nbytes += entry.size
        if entry.modified is not None:
            self.used = max(entry.modified, self.used or entry.modified)


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of a store. `chunks` are all chunks, each before those that follow it; `roots`
    begin a tree: chunk 0 of a prompt, or one whose chunk before is not there; `lost` are chunks
    without a head that could be read.
    """

    chunks: tuple[Chunk, ...]
    roots: tuple[Chunk, ...]
    lost: tuple[Chunk, ...]


def chunks_of(entries: Iterable[Listed]) -> list[Chunk]:
    """Objects that are listed, by chunk."""
    chunks: dict[tuple[str, bytes], Chunk] = {}
    for entry, name in objects_of(entries):
        place = name.namespace, name.key
        chunk = chunks.setdefault(place, Chunk(name.namespace, name.key))
        chunk.add_object(entry, name.kind)
    return list(chunks.values())


def read_forest(floor: Floor, chunks: Sequence[Chunk], tell: Tell = untold) -> Forest:
    """Reads a head of each chunk, and links them. Raises FloorError."""
    with ThreadPoolExecutor(READ_AT_ONCE, "kvpool heads") as threads:
        # few at once: all of a large store would wait in the threads' queue
        left, done = iter(chunks), 0
        while batch := [*islice(left, 8 * READ_AT_ONCE)]:
            for chunk, start in zip(batch, threads.map(lambda one: _start(floor, one), batch)):
                if isinstance(start, Start):
                    chunk.number, chunk.parent = start.identity.chunk, start.parent
                else:
                    chunk.why = start
            done += len(batch)
            tell("reading heads", done)
    return linked(chunks)


def linked(chunks: Sequence[Chunk]) -> Forest:
    """Chunks whose heads were read, as trees. Heads come from strangers: a chunk follows another
    only if their numbers do too, so that there is no circle.
    """
    numbered = sorted((c for c in chunks if c.number is not None), key=lambda c: c.number or 0)
    by_key = {(chunk.namespace, chunk.key): chunk for chunk in numbered}
    roots: list[Chunk] = []
    for chunk in numbered:
        before = by_key.get((chunk.namespace, chunk.parent or NO_PARENT))
        if before is not None and (before.number or 0) + 1 == chunk.number:
            before.children.append(chunk)
        else:
            roots.append(chunk)
    return Forest(tuple(numbered), tuple(roots), tuple(c for c in chunks if c.number is None))


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks one after the other, each the only one to follow the one before. `depth` is how many
    runs come before it in its tree, and `branches` how many follow it.
    """

    chunks: tuple[Chunk, ...]
    depth: int
    branches: int

    @property
    def first(self) -> int:
        return self.chunks[0].number or 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def runs(root: Chunk) -> Iterator[Run]:
    """A tree as runs, each followed by its branches, those with the longest run first."""
    left = [(root, 0)]
    while left:
        chunk, depth = left.pop()
        run = [chunk]
        while len(chunk.children) == 1:
            (chunk,) = chunk.children
            run.append(chunk)
        yield Run(tuple(run), depth, len(chunk.children))
        left += [(child, depth + 1) for child in sorted(chunk.children, key=_reach)]


def _reach(chunk: Chunk) -> int:
    """How many chunks follow one another from here until a branch."""
    count = 1
    while len(chunk.children) == 1:
        (chunk,) = chunk.children
        count += 1
    return count


def _start(floor: Floor, chunk: Chunk) -> Start | str:
    """What the first sound head of a chunk's objects says, or why there is none."""
    why = ""
    for name in chunk.names:
        try:
            with floor.read(name, [(0, START_BYTES)]) as (data,):
                start = decode_start(data)
            if start.identity.name(chunk.namespace) != name:
                raise Damaged("its head is of another object.")
            return start
        except (Damaged, BeyondEnd, NotThere) as error:
            why = f"{name}: {error}"
    return why
