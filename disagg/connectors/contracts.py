"""The contract of an engine, served where its settings say so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import Logger
from types import FrameType
from typing import Protocol

from disagg.connectors.rank.producing import offered_conventions
from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from disagg.contract.contract import Contract, ContractRank, Serves, versions
from disagg.contract.server import ContractServer
from disagg.protocol.messages import Convention
from kvpool.layout import PoolLayout


class Describing(Protocol):
    """What a rank tells its scheduler: its endpoint address if it is prefill's, its layout as
    msgpack, and its conventions.
    """

    @property
    def address(self) -> str | None: ...

    @property
    def layout(self) -> bytes: ...

    @property
    def conventions(self) -> Mapping[str, Convention]: ...


@dataclass(frozen=True, kw_only=True)
class RankDescription:
    """The same, of an engine that has no form of its own for it."""

    address: str | None
    layout: bytes
    conventions: Mapping[str, Convention]

    @classmethod
    def of(cls, rank: Rank, conventions: Mapping[str, Convention]) -> RankDescription:
        return cls(address=rank.address, layout=rank.layout.to_msgpack(), conventions=conventions)


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """The engine of `package`: its sides, and its number among engines that share one
    setting (data parallelism). `size`: how many ranks it has; number `first` and those
    after it are described here.
    """

    package: str
    produces: bool
    consumes: bool
    size: int
    first: int = 0
    number: int = 0

    @property
    def serves(self) -> tuple[Serves, ...]:
        sides: dict[Serves, bool] = {"prefill": self.produces, "decode": self.consumes}
        return tuple(side for side, serves in sides.items() if serves)

    def contract(self, settings: Settings, ranks: Sequence[Describing]) -> Contract:
        """Raises ValueError for what a contract cannot say."""
        return Contract(
            engine=settings.engine,
            serves=self.serves,
            size=self.size,
            ranks=tuple(
                _rank_of(settings, number, rank) for number, rank in enumerate(ranks, self.first)
            ),
            allow_missing=tuple(settings.allow_missing),
            cast=settings.cast if isinstance(settings.cast, bool) else tuple(settings.cast),
            versions=versions(self.package),
        )


def _rank_of(settings: Settings, number: int, rank: Describing) -> ContractRank:
    layout = PoolLayout.from_msgpack(rank.layout)
    conventions = settings.options(rank.conventions)["conventions"]
    conventions = offered_conventions(settings, layout, conventions)
    return ContractRank.of(number, layout, conventions, rank.address)


def serve_contract(
    settings: Settings, engine: ServingEngine, ranks: Sequence[Describing], log: Logger
) -> ContractServer | None:
    """Serves the contract of an engine, or of those of its ranks that are known here: at the
    setting's port, and where several servers share that setting at ports behind it. What goes wrong
    is logged once: the engine serves all the same.
    """
    if settings.contract is None:
        return None
    # a server for each engine; and where no rank knows the others, for each rank
    alone = len(ranks) == engine.size
    offset = engine.number if alone else engine.number * engine.size + engine.first
    try:
        server = ContractServer(settings.contract, engine.contract(settings, ranks), offset)
    except Exception as error:
        log.error("no contract is served: %s", error, exc_info=not isinstance(error, ValueError))
        return None
    log.info("the contract of this engine: http://%s/contract", server.address)
    return server


def drain_at_sigterm(server: ContractServer) -> None:
    """`/healthz` says from SIGTERM on that the engine ends. For an engine that handles it, ends its
    requests then, and tells a connector only when that is done.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return

    def drain(number: int, frame: FrameType | None) -> None:
        server.drain()
        handler(number, frame)

    signal.signal(signal.SIGTERM, drain)
