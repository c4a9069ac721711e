"""Prefill's part of a check: endpoints over memory of their own, which offer what a check asks."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from uuid import uuid4

from disagg.cli.check.memory import CheckMemory, most_tokens
from disagg.connectors.settings import Settings
from disagg.contract.contract import Contract
from disagg.errors import RoomError, UnknownRoom
from disagg.protocol.messages import Room
from disagg.protocol.status import KVPoll
from disagg.runtime.options import PEER_TIMEOUT, Options
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from disagg.runtime.sockets.listen_address import ListenAddress

PAUSE = 0.002
NAME = re.compile(r"check-[0-9a-f]{32}-([0-9]{1,7})")


def room_of(tokens: int) -> str:
    """A new room of a check, whose name says to prefill how many tokens it has."""
    return f"check-{uuid4().hex}-{tokens}"


def addresses_of(text: str, ranks: int) -> list[str]:
    """Of a check's prefill ranks: a port and those behind it, free ones (`tcp://HOST:*`, `ipc://*`),
    or an address for each, separated by commas. Raises ValueError.
    """
    parts = [ListenAddress.parse(part.strip()) for part in text.split(",")]
    if len(parts) == 1 and parts[0].first:
        parts = [replace(parts[0], by_rank=True).of_rank(number) for number in range(ranks)]
    elif len(parts) == 1:
        parts *= ranks
    listens = [part.host or str(part) == "ipc://*" for part in parts]
    if len(parts) != ranks or not all(listens) or any(part.by_rank for part in parts):
        raise ValueError(
            f"{text}: prefill has {ranks} ranks: give tcp://HOST:PORT, whose port is the first of "
            "so many, or an address for each, separated by commas."
        )
    return [str(part) for part in parts]


def endpoint_options(settings: Settings, conventions: Options) -> Options:
    """As the engine's endpoints have them, but for a patience that does not wait for its steps."""
    return {**conventions, "peer_timeout": settings.peer_timeout or PEER_TIMEOUT}


class CheckOffers:
    """An endpoint for each rank of a contract. Raises what endpoints, engines and devices do."""

    def __init__(
        self, contract: Contract, settings: Settings, binds: Sequence[str], device: str | None
    ) -> None:
        self.tokens = most_tokens([rank.layout for rank in contract.ranks])
        self._offers: list[tuple[PrefillEndpoint, CheckMemory]] = []
        advertise = settings.advertise and _any_port(settings.advertise)
        with ExitStack() as stack:
            for rank, bind in zip(contract.ranks, binds, strict=True):
                memory = CheckMemory.of(rank.layout, self.tokens, device)
                memory.fill()
                options = settings.options(rank.conventions)
                endpoint = PrefillEndpoint(
                    memory.layout,
                    settings.new_engine(),
                    bind,
                    advertise=advertise,
                    **endpoint_options(settings, options),
                )
                self._offers.append((stack.enter_context(endpoint), memory))
            self._stack = stack.pop_all()
        self.addresses = [endpoint.address for endpoint, _ in self._offers]

    def __enter__(self) -> CheckOffers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, seconds: float) -> None:
        """Offers the rooms that are asked for, for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for endpoint, memory in self._offers:
                self._answer(endpoint, memory)
            time.sleep(PAUSE)

    def _answer(self, endpoint: PrefillEndpoint, memory: CheckMemory) -> None:
        # a copy in one step: the endpoint's thread opens rooms meanwhile
        for room in tuple(endpoint.machine.rooms.open):
            with suppress(UnknownRoom):  # it has ended, and is forgotten
                if endpoint.poll(room) is KVPoll.WaitingForInput:
                    self._offer(endpoint, memory, room)
        for ended in endpoint.ended():
            endpoint.forget(ended.room)

    def _offer(self, endpoint: PrefillEndpoint, memory: CheckMemory, room: Room) -> None:
        match = NAME.fullmatch(str(room))
        tokens = int(match[1]) if match else 0
        if not 0 < tokens <= memory.tokens:
            endpoint.reject(
                room,
                "`kvpool check --serve` offers requests of checks only, of at most "
                f"{memory.tokens} tokens. Use the same kvpool and contract on both hosts.",
            )
            return
        with suppress(RoomError):  # decode has ended it meanwhile
            endpoint.send(room, memory.address(tokens))


def _any_port(advertise: str) -> str:
    """The host of a server's setting, with the port at which a check listens."""
    return str(replace(ListenAddress.parse(advertise), first=0, last=0, by_rank=False))
