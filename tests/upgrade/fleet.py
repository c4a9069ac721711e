"""Two prefills and two decodes under load, replaced one after another, and what became of every
request.

Requests go to pairs that `examples/picker.py` picks by the contracts of the running servers. Beside
them a router that knows nothing sends to every pair: what does not fit has to be refused by name,
and its request is sent again, to a pair of the picker's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count, product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from disagg.contract import Fit, read_contract
from disagg.contract.fit import Objection
from examples.picker import groups, picks
from tests.upgrade.servers import Build, Server

PLACES = "prefill0", "decode0", "prefill1", "decode1"
"""In the order in which they are replaced."""
PICKED = 4
"""Requests of the picker's that are open at once."""
ANSWERS = 3
"""Of each pair that fits, before the next process is replaced."""
OPEN = 16
"""Attempts at most, before those who were refused try again: their pages fit every pool."""
BOUND_SECONDS = 120


class Violation(AssertionError):
    """An answer was mixed, a refusal has no name, or a request failed between live processes."""


@dataclass(kw_only=True, eq=False)
class Request:
    """What a client asked for, and its attempts so far."""

    prompt: int
    tokens: int
    by_picker: bool
    attempts: int = 0


@dataclass(kw_only=True, eq=False)
class Attempt:
    """A request at a pair of servers, and how it ended on each."""

    room: str
    request: Request
    prefill: Server
    decode: Server
    ends: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether a process that lives holds pages of it."""
        return any(s.alive and s.side not in self.ends for s in (self.prefill, self.decode))


class Fleet(AbstractContextManager["Fleet"]):
    """The servers by place, and counts: requests asked, answered, refused, failed on killed ones.
    `counts[prefill's build, decode's build]` are answers of such pairs.
    """

    def __init__(self, build: Build, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        starting = {place: Server(place, build, engine, folder) for place in PLACES}
        self.servers = {place: server.up() for place, server in starting.items()}
        self.replaced: list[Server] = []
        self.counts: Counter[Any] = Counter()
        self.attempts: dict[str, Attempt] = {}
        self._numbers, self._waiting = count(), list[Request]()
        self._loaded = True
        self.objections: dict[tuple[Server, Server], list[Objection]] = {}
        """Of every pair that there was."""
        self._look()

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            if server.alive:
                list(server.kill())

    def _staying(self) -> list[Server]:
        return [server for server in self.servers.values() if not server.leaves]

    def pairs(self) -> Iterator[tuple[Server, Server]]:
        sides: dict[str, list[Server]] = {"prefill": [], "decode": []}
        for server in self._staying():
            sides[server.side].append(server)
        return product(sides["prefill"], sides["decode"])

    def _look(self) -> None:
        """Asks every server for its contract, as a router does when servers come or go."""
        self.verdicts: Counter[tuple[Server, Server]] = Counter()
        contracts = {server: read_contract(server.source) for server in self._staying()}
        for prefill, decode in self.pairs():
            fit = Fit(
                prefill=contracts[prefill],
                decode=contracts[decode],
                names=(str(prefill), str(decode)),
                tokens=100,
            )
            self.objections[prefill, decode] = fit.objections()
        by_source = {server.source: server for server in contracts}
        self._picks = (
            (by_source[prefill], by_source[decode])
            for _, prefill, decode in picks(groups([*by_source]), count())
        )

    def replace(self, place: str, build: Build, *, drained: bool = False) -> None:
        """Kills a server in the middle of what it does, or once its requests have ended; and starts
        another one.
        """
        old = self.servers[place]
        if drained:
            old.leaves = True
            self._look()
            attempts = self.attempts.values
            self._until(lambda: not any(old in (a.prefill, a.decode) for a in attempts()))
        for told in old.kill():
            self._take(old, told)
        self.replaced.append(old)
        for attempt in [*self.attempts.values()]:
            if old in (attempt.prefill, attempt.decode):
                self._lose(attempt)
        self.servers[place] = Server(place, build, self.engine, self.folder).up()
        for server in self.servers.values():
            if old.side == "prefill" and server.side == "decode":
                server.send("forget", address=old.address)
        self._look()

    def _lose(self, attempt: Attempt) -> None:
        """One of its servers is dead: the other one is told, as by a router."""
        if not attempt.decode.alive and "decode" not in attempt.ends:
            self.counts["failed on killed"] += 1
        for server in (attempt.prefill, attempt.decode):
            if server.alive and server.side not in attempt.ends:
                server.send("abort", room=attempt.room)
        self._close(attempt)

    def until_served(self) -> None:
        """Goes on until each pair has shown since the last change whether it fits."""
        self._until(
            lambda: all(
                self.verdicts[pair] >= (1 if self.objections[pair] else ANSWERS)
                for pair in self.pairs()
            )
        )

    def finish(self) -> None:
        """No new requests; every open one ends."""
        self._loaded = False
        self._until(lambda: not self.attempts and not self._waiting)
        asked = self.counts["answered"] + self.counts["failed on killed"]
        if asked != self.counts["asked"]:
            raise Violation(f"{self.counts['asked']} requests, of which {asked} have ended")

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise Violation(f"nothing for {BOUND_SECONDS} s: {self.told()}")
            self._fill()
            pipes = {server.pipe: server for server in self.servers.values()}
            for pipe in wait([*pipes], timeout=1):
                self._take(pipes[pipe], pipe.recv())

    def told(self) -> str:
        """Where it stands, for a test that fails."""
        unfinished = [
            (a.room, str(a.prefill), str(a.decode), a.ends) for a in self.attempts.values()
        ]
        verdicts = {f"{p} to {d}": number for (p, d), number in self.verdicts.items()}
        return f"{dict(self.counts)} {verdicts} {unfinished}"

    def _fill(self) -> None:
        """Requests: so many by the picker, and one by whoever knows nothing, at each pair."""
        while self._waiting and len(self.attempts) < OPEN and (pair := next(self._picks, None)):
            self._try(self._waiting.pop(), pair)
        # refusals come faster than answers, which those who were refused wait for
        if not self._loaded or len(self._waiting) >= OPEN:
            return
        requests = [attempt.request for attempt in self.attempts.values()]
        for _ in range(PICKED - sum(request.by_picker for request in requests)):
            if pair := next(self._picks, None):
                self._try(self._asked(by_picker=True), pair)
        busy = {(a.prefill, a.decode) for a in self.attempts.values() if not a.request.by_picker}
        for pair in self.pairs():
            if pair not in busy:
                self._try(self._asked(by_picker=False), pair)

    def _asked(self, by_picker: bool) -> Request:
        self.counts["asked"] += 1
        prompt = next(self._numbers)
        return Request(prompt=prompt, tokens=20 + 37 * prompt % 180, by_picker=by_picker)

    def _try(self, request: Request, pair: tuple[Server, Server]) -> None:
        request.attempts += 1
        prefill, decode = pair
        room = f"request {request.prompt} attempt {request.attempts}"
        self.attempts[room] = Attempt(room=room, request=request, prefill=prefill, decode=decode)
        order = {"room": room, "prompt": request.prompt, "tokens": request.tokens}
        prefill.send("prefill", **order)
        decode.send("decode", address=prefill.address, **order)

    def _take(self, server: Server, told: dict[str, Any]) -> None:
        """What a server has said of a room."""
        if told["event"] == "problem" or told.get("problems"):
            raise Violation(f"{server}: {told.get('text') or told['problems']}")
        attempt = self.attempts[told["room"]]
        attempt.ends[server.side] = told
        if server.side == "decode":
            self._judge(attempt, told)
        self._close(attempt)

    def _judge(self, attempt: Attempt, told: Mapping[str, Any]) -> None:
        """What decode has made of a request."""
        pair = attempt.prefill, attempt.decode
        names = f"{attempt.room}, {pair[0]} to {pair[1]}"
        objections = self.objections[pair]
        self.verdicts[pair] += 1
        if told["kind"] is None:
            if told["wrong"] or told["by"] != attempt.decode.build.weights:
                raise Violation(f"{names}: mixed, {told['wrong']} bytes are wrong")
            if objections:
                raise Violation(f"{names}: answered, though {objections[0].reason}")
            self.counts["answered"] += 1
            self.counts[pair[0].build.name, pair[1].build.name] += 1
            for server in pair:
                server.answered += 1
            return
        if not attempt.prefill.alive:
            self.counts["failed on killed"] += 1
            return
        if told["kind"] != "refused" or not any(named(o, told["reason"]) for o in objections):
            raise Violation(f"{names}: {told['kind']}, {told['reason']}")
        self.counts["refused"] += 1
        if attempt.request.by_picker:
            raise Violation(f"{names}: picked, and refused: {told['reason']}")
        attempt.prefill.send("abort", room=attempt.room)
        self._waiting.append(attempt.request)

    def _close(self, attempt: Attempt) -> None:
        if attempt.open:
            return
        ends = attempt.ends
        both = {"prefill", "decode"} <= ends.keys()
        if both and ends["decode"]["kind"] is None and ends["prefill"]["kind"] is not None:
            raise Violation(f"{attempt.room}: answered, and prefill says {ends['prefill']}")
        del self.attempts[attempt.room]


def named(objection: Objection, reason: str) -> bool:
    """Whether a refusal is about what the contracts differ in: a protocol is told from either side,
    everything else in the same words.
    """
    return (f"{objection.about} " if objection.about == "protocol" else objection.reason) in reason
