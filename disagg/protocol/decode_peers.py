"""The prefills that decode reads from: handshakes, signs of life, loss and return of their ranks.
Part of `DecodeMachine`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from disagg.errors import RoomError
from disagg.plan import Group, IncompatibleLayouts
from disagg.plan.cache import PlanCache
from disagg.protocol import messages
from disagg.protocol.effects import ConnectEngine, Dial, DropPeer, Effects, HangUp
from disagg.protocol.link import Link
from disagg.protocol.liveness import CHECKS_PER_TIMEOUT, PINGS_PER_TIMEOUT, Liveness
from disagg.protocol.messages import Hello, Message
from disagg.protocol.rooms.offered import layers_by_owner
from disagg.protocol.status import Failure, Side
from disagg.protocol.wanted import wanted_layout
from kvpool.layout import PoolLayout, Region, Space

log = logging.getLogger("disagg")

FIRST_PAUSE = 0.25
"""Of the shorter time-out: before a rank is dialled again that refuses this decode for now."""
MAX_UNTOLD = 10_000
"""Rooms that failed here while a rank was lost, of which it is told when it is back: the latest."""
KEPT_SHAPES = 64
"""Layouts whose regions others share: those of the latest."""

_Inside = tuple[tuple[Region, ...], tuple[Space, ...]]


class LinkReady(NamedTuple):
    """Every rank has answered, and the transfer is planned: its rooms can be asked for."""

    link: Link


class LinkFailed(NamedTuple):
    """The rooms of a link fail; with `asked`, only those that were asked for: the others wait on.
    `except_rank` is the rank that knows, or that does not listen.
    """

    link: Link
    failure: Failure
    except_rank: int | None = None
    asked: bool = False


LinkChange = LinkReady | LinkFailed


class DecodePeers:
    """All links of one decode endpoint, of whose rooms each is read by `readers`. Ranks are
    numbered over all links that ever were.
    """

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int | Group,
        effects: Effects,
        now: float,
        allow_missing: Collection[str] = (),
    ) -> None:
        members = readers.layouts if isinstance(readers, Group) else (layout,)
        self.hello, self.layout = replace(hello, layout=wanted_layout(members)), layout
        self._group = readers if isinstance(readers, Group) else None
        self._readers = len(readers.layouts) if isinstance(readers, Group) else readers
        self.links: list[Link] = []
        self.plans = PlanCache(allow_missing)
        self.liveness: Liveness[int] = Liveness(hello.timeout, now)
        self._effects = effects
        self._at: dict[int, tuple[Link, int]] = {}
        self._ranks = 0
        self._alike: OrderedDict[_Inside, PoolLayout] = OrderedDict()
        self._shortest, self._next_check = hello.timeout, 0.0

    def connect(self, link: Link, now: float) -> None:
        """Dials all ranks of a prefill and says hello."""
        link.first = self._ranks
        self._ranks += len(link.addresses)
        self.links.append(link)
        for source in range(len(link.addresses)):
            self._at[link.first + source] = link, source
            self._dial(link, source, now)

    def check(self, link: Link) -> None:
        """Raises RoomError for a link that is not one of these."""
        if self._at.get(link.first, (None, 0))[0] is not link:
            raise RoomError("the link is another endpoint's, or it was disconnected.")

    def disconnect(self, link: Link) -> None:
        """Gives a link up for good, once its rooms have failed."""
        self._say_goodbye(link)
        self._drop(link)
        self.links.remove(link)
        for source in range(len(link.addresses)):
            del self._at[link.first + source]
            self._effects.append(HangUp(link.first + source))

    def notify_shutdown(self) -> None:
        """Tells every prefill that this decode is gone, so that none waits for a timeout."""
        for link in self.links:
            self._say_goodbye(link)

    def at(self, rank: int) -> tuple[Link, int] | None:
        """The link and source number of a rank; None once it is disconnected."""
        return self._at.get(rank)

    def ranks(self) -> set[int]:
        """Ranks of all links."""
        return set(self._at)

    def live(self) -> int:
        """Ranks that have answered and are not lost."""
        return sum(hello is not None for link in self.links for hello in link.hellos)

    def receive(self, link: Link, source: int, message: Message, now: float) -> LinkChange | None:
        """Handles a hello, or one of the messages that concern no room."""
        if isinstance(message, Hello):
            return self._handshake(link, source, message)
        if isinstance(message, messages.Refuse):
            if message.final:
                return self._refuse(link, [message.why], "prefill", source)
            reason = f"it refuses this decode: {message.why}"
            return self._pause(link, source, reason, "prefill", now)
        hello = link.hellos[source]
        if (
            isinstance(message, messages.UnknownPeer)
            and hello
            and hello.generation == message.generation
        ):
            reason = "it no longer knows this decode: it has restarted, or has dropped it."
            return self.mark_dead(link, source, reason, now, logging.INFO)  # it has said so itself
        return None

    def tick(self, now: float) -> list[LinkFailed]:
        """Sends pings, dials again who has refused, and gives up ranks that have been silent too
        long.
        """
        if now < self._next_check:
            return []
        self._next_check = now + self._shortest / CHECKS_PER_TIMEOUT
        failed = []
        for rank in self.liveness.dead(now):
            link, source = self._at[rank]
            how = "has not answered" if link.hellos[source] is None else "was silent"
            reason = f"it {how} for more than {self.hello.timeout:g} s."
            lost = self.mark_dead(link, source, reason, now)
            failed += [lost] if lost else []
        for link in self.links:
            if link.refusal is not None:
                continue
            for source, at in enumerate(link.redials):
                if at is not None and at <= now:
                    link.redials[source] = None
                    self._dial(link, source, now)
            for source, hello in enumerate(link.hellos):
                if hello is None:
                    continue
                pause = min(self.hello.timeout, hello.timeout) / PINGS_PER_TIMEOUT
                if now - link.pinged[source] >= pause:
                    link.pinged[source] = now
                    self.send(link, source, messages.Ping(hello.generation))
        return failed

    def mark_dead(
        self, link: Link, source: int, reason: str, now: float, level: int = logging.WARNING
    ) -> LinkFailed | None:
        """A rank is gone: its reads are given up, and it is dialled anew."""
        if link.refusal is not None or link.redials[source] is not None:
            return None
        lost = self._lose(link, source, reason, level)
        self._dial(link, source, now)
        return LinkFailed(link, Failure("prefill", lost, "lost"), source)

    def refuse(self, link: Link, source: int, reason: str, now: float) -> LinkFailed | None:
        """A rank breaks the protocol: it is told, and may do better later."""
        if link.refusal is not None or link.redials[source] is not None:
            return None
        self.send(link, source, messages.Refuse([reason], final=False))
        return self._pause(link, source, f"it was refused: {reason}", "decode", now)

    def send(self, link: Link, source: int, message: Message) -> None:
        """Sends to one rank of a link, unless it is not connected now."""
        if link.redials[source] is None:
            self._effects.send(link.first + source, message)

    def drop_room(self, link: Link, drop: messages.DropRoom, except_rank: int | None) -> None:
        """Tells the ranks of a room for which they will not be asked; those that are lost once they
        are back, before they are asked for anything.
        """
        for source, hello in enumerate(link.hellos):
            if hello is None and link.lost is not None:
                untold = link.untold[source]
                untold[drop.room] = drop
                if len(untold) > MAX_UNTOLD:
                    untold.popitem(last=False)
            elif source != except_rank:
                self.send(link, source, drop)

    def _dial(self, link: Link, source: int, now: float) -> None:
        rank = link.first + source
        self._effects.append(Dial(rank, link.addresses[source]))
        self.liveness.heard(rank, now)
        self.send(link, source, self.hello)

    def _pause(self, link: Link, source: int, reason: str, side: Side, now: float) -> LinkFailed:
        """A rank and this decode do not work together for now: it is dialled again after a pause,
        which doubles up to the shorter time-out.
        """
        hello, rank = link.hellos[source], link.first + source
        most = min(self.hello.timeout, hello.timeout if hello else self.hello.timeout)
        link.pauses[source] = min(most, max(FIRST_PAUSE * most, 2 * link.pauses[source]))
        lost = self._lose(link, source, reason)
        self.liveness.forget(rank)
        self._effects.append(HangUp(rank))
        link.redials[source] = now + link.pauses[source]
        return LinkFailed(link, Failure(side, lost, "refused"), source, asked=True)

    def _lose(self, link: Link, source: int, reason: str, level: int = logging.WARNING) -> str:
        known = link.lost is not None
        link.plan, link.hellos[source], link.layouts[source] = None, None, None
        link.lost = lost = f"{link.name(source)} is lost: {reason}"
        log.log(logging.DEBUG if known else level, "%s", lost)
        self._effects.append(DropPeer(link, source))
        return lost

    def _handshake(self, link: Link, source: int, hello: Hello) -> LinkChange | None:
        if link.hellos[source] is not None:
            return None  # a duplicate
        if problems := messages.handshake_problems(self.hello, hello):
            return self._refuse(link, problems, "decode")
        link.hellos[source] = hello
        for drop in link.untold[source].values():
            self.send(link, source, drop)
        link.untold[source].clear()
        if hello.timeout < self._shortest:
            self._shortest, self._next_check = hello.timeout, 0.0
        hellos = [each for each in link.hellos if each is not None]
        if len(hellos) < len(link.hellos):
            return None
        before, own = self.plans.seconds, self.hello.conventions
        found = [each for rank in hellos for each in messages.differences(rank.conventions, own)]
        problems = [*dict.fromkeys(found)]
        try:
            layouts = [self._layout(link, rank, each) for rank, each in enumerate(hellos)]
            made = self.plans.plan(layouts, self.layout, self._group)
        except ValueError as error:  # LayoutError and IncompatibleLayouts among them
            if isinstance(error, IncompatibleLayouts) and not problems:
                link.error = error
            return self._refuse(link, [*problems, str(error)], "decode")
        if problems:
            return self._refuse(link, problems, "decode")
        link.plan = made
        if alone := {name for rank in hellos for name in rank.conventions.keys() ^ own.keys()}:
            names = ", ".join(sorted(alone))
            log.info("%s: not compared is what only one side says: %s", link.name(0), names)
        every = dict.fromkeys(range(len(layouts)), self._readers)
        link.asks = every if self._group is None else made.asks
        link.held = {source: layers_by_owner(layouts[source]) for source in link.asks}
        link.plan_seconds = self.plans.seconds - before
        if link.lost is not None:
            log.info("%s is back", link.name(source))
        link.lost = None
        link.pauses = [0.0] * len(link.pauses)
        link.unconnected = set(link.plan.contributors())
        for rank in link.unconnected:
            self._effects.append(ConnectEngine(link, rank, hellos[rank]))
        return LinkReady(link)

    def _layout(self, link: Link, source: int, hello: Hello) -> PoolLayout:
        """A rank's layout, read once. Ranks of many prefills are alike: what is equal is kept once.
        Raises LayoutError.
        """
        known = link.layouts[source]
        if known is None:
            known = link.layouts[source] = PoolLayout.from_msgpack(hello.layout)
            inside = known.regions, known.spaces
            known.share(self._alike.setdefault(inside, known))
            self._alike.move_to_end(inside)
            if len(self._alike) > KEPT_SHAPES:
                self._alike.popitem(last=False)
            link.hellos[source] = replace(hello, layout=b"")
        return known

    def _refuse(
        self, link: Link, reasons: Sequence[str], side: Side, except_rank: int | None = None
    ) -> LinkFailed:
        link.refusal = "\n".join(reasons)
        link.plan = None
        refusal = messages.Refuse([*reasons])
        for source in range(len(link.addresses)):
            if source != except_rank:
                self.send(link, source, refusal)
        self._drop(link)
        return LinkFailed(link, Failure(side, link.refusal, "refused"))

    def _say_goodbye(self, link: Link) -> None:
        for source in range(len(link.addresses)):
            self.send(link, source, messages.Disconnect())

    def _drop(self, link: Link) -> None:
        """Stops to wait for any rank of a link, and to read from it."""
        for source in range(len(link.addresses)):
            self.liveness.forget(link.first + source)
            self._effects.append(DropPeer(link, source))
