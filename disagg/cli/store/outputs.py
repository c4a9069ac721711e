"""What the commands of `kvpool store` print with --json. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from disagg.store.upkeep.check import ObjectVerdict
from disagg.store.upkeep.compare import ComparedRow


class Served(TypedDict):
    """What `kvpool store serve --json` prints when the store can be used."""

    url: str
    host: str
    port: int
    http_port: int
    memory: int
    pid: int


class Checked(TypedDict):
    """What `kvpool store check --json` prints: objects by state, and those that are not sound."""

    url: str
    counts: dict[str, int]
    bytes: int
    problems: list[ObjectVerdict]
    deleted: list[str]


class RemovedChunks(TypedDict):
    """What was removed, or would be."""

    chunks: int
    objects: int
    bytes: int


class KeptChunks(TypedDict):
    """What is left."""

    chunks: int
    bytes: int


class Collected(TypedDict):
    """What `kvpool store gc --json` prints. `oldest`: the least recent use of what is kept."""

    url: str
    dry_run: bool
    removed: RemovedChunks
    kept: KeptChunks
    oldest: float | None
    swept: int


class StoredKind(TypedDict):
    """The objects of one kind of state."""

    kind: str
    objects: int
    bytes: int
    oldest: float | None
    newest: float | None


class StoredGeometry(TypedDict):
    """Number, ranks and conventions are null where the catalogue has none."""

    number: int | None
    geometry: str
    ranks: int | None
    conventions: dict[str, Any] | None
    kinds: list[StoredKind]


class UnreadGeometry(TypedDict):
    """A geometry of the catalogue that cannot be read."""

    number: int
    reason: str


class StoredNamespace(TypedDict):
    """A namespace; `text` is what its name is the digest of."""

    namespace: str
    text: dict[str, Any] | None
    chunk_tokens: int | None
    chunks: int
    objects: int
    bytes: int
    oldest: float | None
    newest: float | None
    geometries: list[StoredGeometry]
    refused: list[UnreadGeometry]


class ForeignObjects(TypedDict):
    """What the floor holds that is not kvpool's."""

    objects: int
    bytes: int
    names: list[str]


class Listing(TypedDict):
    """What `kvpool store ls --json` prints."""

    url: str
    namespaces: list[StoredNamespace]
    foreign: ForeignObjects


class Shown(TypedDict):
    """What `kvpool store show --json` prints: a namespace as `ls` does, a geometry (with `parts`),
    or an object (with `key`).
    """

    namespace: NotRequired[str]
    text: NotRequired[dict[str, Any] | None]
    chunk_tokens: NotRequired[int | None]
    chunks: NotRequired[int]
    objects: NotRequired[int]
    oldest: NotRequired[float | None]
    newest: NotRequired[float | None]
    geometries: NotRequired[list[StoredGeometry]]
    refused: NotRequired[list[UnreadGeometry]]
    number: NotRequired[int | None]
    geometry: NotRequired[str]
    conventions: NotRequired[dict[str, Any]]
    parts: NotRequired[list[dict[str, Any]]]
    name: NotRequired[str]
    kind: NotRequired[str]
    chunk: NotRequired[int]
    first_token: NotRequired[int]
    tokens: NotRequired[int]
    key: NotRequired[str]
    parent: NotRequired[str | None]
    part: NotRequired[int]
    bytes: NotRequired[int]
    blocks: NotRequired[int]
    layout: NotRequired[dict[str, Any]]


class ComparedSide(TypedDict):
    """One side, and the kinds of state that a reader of its chunks needs."""

    name: str
    namespace: str
    chunk_tokens: int
    needs: list[str]


class Direction(TypedDict):
    """Whether what one side writes is read by the other, and why not."""

    shares: bool
    reasons: list[str]
    converts: bool


class Compared(TypedDict):
    """What `kvpool store explain --json` prints."""

    a: ComparedSide
    b: ComparedSide
    namespace: list[ComparedRow]
    conventions: list[ComparedRow]
    a_to_b: Direction
    b_to_a: Direction
