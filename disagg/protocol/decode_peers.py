"""Whom decode talks to: greeting, signs of life, loss and return of prefill ranks, as a state
machine; no sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from disagg.plan import IncompatibleLayouts
from disagg.plan.cache import PlanCache
from disagg.protocol.decode_state import Link
from disagg.protocol.liveness import LOOKS, PINGS, Silence
from disagg.protocol.messages import (
    MAX_TEXT,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    UnknownPeer,
    encode,
    greeting_problems,
    joined,
    reason_text,
)
from disagg.protocol.status import Failure
from kvpool.layout import PoolLayout

log = logging.getLogger("disagg")


class Links:
    """All links of one decode endpoint. Calls append to `outbox` (rank, bytes), `dials` (ranks
    whose socket is to be replaced before anything is sent) and `partings` (ranks whose reads are
    to be given up).

    `ready(link)` is called when a link can be used, `failed(link, failure, but)` when it cannot any
    more; `but` is the rank that knows, or does not listen.
    """

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        ready: Callable[[Link], None],
        failed: Callable[[Link, Failure, int | None], None],
        clock: Callable[[], float] = time.monotonic,
        allow_missing: Collection[str] = (),
    ) -> None:
        self.hello, self.layout = hello, layout
        self.outbox: list[tuple[int, bytes]] = []
        self.dials: list[int] = []
        self.partings: list[tuple[Link, int]] = []
        self.links: list[Link] = []
        self.plans = PlanCache(allow_missing)
        self.plan_seconds = 0.0
        self._ready, self._failed, self._clock = ready, failed, clock
        self._at: dict[int, tuple[Link, int]] = {}
        self._silence: Silence[int] = Silence(hello.timeout, clock())
        self._ranks = 0
        self._shortest, self._next_look = hello.timeout, 0.0

    def connect(self, addresses: Sequence[str]) -> Link:
        """Says hello to all ranks of one prefill."""
        count = len(addresses)
        link = Link(tuple(addresses), self._ranks, [None] * count, [0.0] * count)
        self._ranks += count
        self.links.append(link)
        for source in range(count):
            self._at[link.first + source] = link, source
            self._silence.heard(link.first + source, self._clock())
            self.post(link, source, self.hello)
        return link

    def disconnect(self, link: Link, reason: str) -> None:
        """Gives a link up for good."""
        self._failed(link, Failure("decode", reason, "abort"), None)
        self._part(link)
        self.links.remove(link)
        for source in range(len(link.addresses)):
            del self._at[link.first + source]

    def at(self, rank: int) -> tuple[Link, int] | None:
        """The link and source number of a rank; None once it is disconnected."""
        return self._at.get(rank)

    def live(self) -> int:
        """Ranks that have answered and are not lost."""
        return sum(hello is not None for link in self.links for hello in link.hellos)

    def receive(self, link: Link, source: int, message: Message) -> bool:
        """Takes a message that concerns no room; whether it was one. Notes every sign of life."""
        if link.refusal is not None:
            return True
        self._silence.heard(link.first + source, self._clock())
        if isinstance(message, Hello):
            self._greet(link, source, message)
        elif isinstance(message, Refuse):
            self._refuse(link, [joined(message.reasons)], "prefill", but=source)
        elif isinstance(message, UnknownPeer):
            hello = link.hellos[source]
            if hello is not None and hello.generation == message.generation:
                reason = "it does not know this decode any more: it has restarted, or given it up."
                self.lose(link, source, reason, logging.INFO)  # it has said so itself
        else:
            return isinstance(message, Pong)
        return True

    def tick(self) -> None:
        """Asks for signs of life, and gives up those that have shown none."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + self._shortest / LOOKS
        for rank in self._silence.dead(now):
            link, source = self._at[rank]
            said = "has not answered" if link.hellos[source] is None else "was silent"
            self.lose(link, source, f"it {said} for more than {self.hello.timeout:g} s.")
        for link in self.links:
            for source, hello in enumerate(link.hellos):
                if hello is None or link.refusal is not None:
                    continue
                if now - link.pinged[source] >= min(self.hello.timeout, hello.timeout) / PINGS:
                    link.pinged[source] = now
                    self.post(link, source, Ping(hello.generation))

    def lose(self, link: Link, source: int, reason: str, level: int = logging.WARNING) -> None:
        """A rank is gone: the link's rooms fail, and the rank is greeted anew."""
        if link.refusal is not None:
            return
        rank, known = link.first + source, link.lost is not None
        link.plan, link.hellos[source] = None, None
        link.lost = f"{link.name(source)} is lost: {reason}"
        log.log(logging.DEBUG if known else level, "%s", link.lost)
        self._failed(link, Failure("prefill", link.lost, "lost"), source)
        self.outbox = [(to, data) for to, data in self.outbox if to != rank]
        self.dials.append(rank)
        self.partings.append((link, source))
        self._silence.heard(rank, self._clock())
        self.post(link, source, self.hello)

    def refuse(self, link: Link, source: int, reason: str) -> None:
        """A rank does not keep the protocol."""
        if link.refusal is None:
            self._refuse(link, [f"{link.name(source)} was refused: {reason}"], "decode")

    def post(self, link: Link, source: int, message: Message) -> None:
        """Encodes at once, so that a message that cannot travel is its sender's error."""
        self.outbox.append((link.first + source, encode(message)))

    def _greet(self, link: Link, source: int, hello: Hello) -> None:
        if link.hellos[source] is not None:
            return  # a duplicate
        problems = greeting_problems(self.hello, hello)
        if problems:
            self._refuse(link, problems, "decode")
            return
        link.hellos[source] = hello
        self._shortest, self._next_look = min(self._shortest, hello.timeout), 0.0
        hellos = [each for each in link.hellos if each is not None]
        if len(hellos) < len(link.hellos):
            return
        began = time.perf_counter()
        try:
            layouts = [PoolLayout.from_msgpack(each.layout) for each in hellos]
            link.plan = self.plans.plan(layouts, self.layout)
        except ValueError as error:  # LayoutError and IncompatibleLayouts among them
            link.error = error if isinstance(error, IncompatibleLayouts) else None
            self._refuse(link, [str(error)], "decode")
            return
        link.plan_seconds = time.perf_counter() - began
        self.plan_seconds += link.plan_seconds
        if link.lost is not None:
            log.info("%s is back", link.name(source))
        link.lost = None
        self._ready(link)

    def _refuse(
        self, link: Link, reasons: Sequence[str], side: str, but: int | None = None
    ) -> None:
        link.refusal = "\n".join(reasons)
        link.plan = None
        told = Refuse([reason_text(reason, MAX_TEXT) for reason in reasons])
        for source in range(len(link.addresses)):
            if source != but:
                self.post(link, source, told)
        self._part(link)
        self._failed(link, Failure(side, link.refusal, "refused"), None)

    def _part(self, link: Link) -> None:
        """Waits for no rank of a link any more, and reads from none."""
        for source in range(len(link.addresses)):
            self._silence.forget(link.first + source)
            self.partings.append((link, source))
