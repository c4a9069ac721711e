"""What an engine's scheduler decides in a step about the store, for its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagg.connectors.blocks import Blocks
from disagg.connectors.settings import Settings
from disagg.protocol.messages import Convention
from disagg.store import Hit, Store
from kvpool.layout import PoolLayout

NO_WEIGHTS = (
    "store: nothing says which weights the model has, without which another model's state could be "
    "read. Give the model as a folder of safetensors files, or name the weights, for all who share "
    'the store: "conventions": {"weights": NAME} beside "store".'
)
States = Mapping[int, Mapping[int, int]]
"""By number of tokens: by group, the block with the state after so many of a request."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The layouts of all ranks, encoded, and what their bytes mean: a store needs them all."""

    ranks: tuple[bytes, ...]
    conventions: Mapping[str, Convention]

    @classmethod
    def of(cls, ranks: Sequence[tuple[bytes, Mapping[str, Convention]]]) -> Opening:
        """Of each rank's layout and conventions. Each stage of a pipeline says something of its own
        layers. Raises ValueError where two say something else of the same.
        """
        conventions: dict[str, Convention] = {}
        for _, rank_conventions in ranks:
            for name, value in rank_conventions.items():
                if conventions.setdefault(name, value) != value:
                    raise ValueError(
                        f"{name}: {conventions[name]!r} on one rank, {value!r} on another. Start "
                        "all ranks of an engine alike."
                    )
        return cls(tuple(layout for layout, _ in ranks), conventions)

    def store(self, settings: Settings, rank: int = 0, layout: PoolLayout | None = None) -> Store:
        """A rank's store; its `layout` lies in this process. Without one, it is for lookups. Raises
        ValueError, and FloorError where the floor does not answer.
        """
        if settings.store is None:
            raise ValueError("settings name no store.")
        document = settings.options(self.conventions)["conventions"]
        if not document.keys() & {"weights", "revision"}:
            raise ValueError(NO_WEIGHTS)
        layouts = [PoolLayout.from_msgpack(data) for data in self.ranks]
        layouts[rank] = layout or layouts[rank]
        return Store(
            settings.store,
            layouts[rank],
            ranks=layouts,
            rank=rank,
            conventions=document,
            chunk_tokens=settings.chunk_tokens,
            timeout=settings.store_timeout,
            room=settings.room,
            cast=settings.cast,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRead:
    """Positions `start` to `stop` of a prefix with chunks `keys` are read to `blocks`."""

    request: str
    keys: tuple[bytes, ...]
    hit: Hit
    blocks: Blocks
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWrite:
    """Chunks from number `first` on, of `keys`, are written from `blocks`, where this step has
    computed `computed` tokens; `parent` is the key of the chunk before the first, if any. Of state
    that a request has once, only what lies at a chunk's end: where `computed` is one, and in
    `states`.
    """

    request: str
    parent: bytes | None
    keys: tuple[bytes, ...]
    first: int
    blocks: Blocks
    computed: int
    states: States


@dataclass(slots=True)
class StoreStep:
    """What the workers do in one step. `aborts` are requests. With `settles`, blocks that were
    written earlier may be another request's from this step on.
    """

    opening: Opening | None = None
    reads: list[StoreRead] = field(default_factory=list)
    writes: list[StoreWrite] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    settles: bool = False
