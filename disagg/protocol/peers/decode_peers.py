"""The prefills that decode reads from: handshakes, signs of life, loss and return of ranks."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from disagg.errors import RoomError
from disagg.log import log
from disagg.plan import Group, IncompatibleLayouts
from disagg.plan.cache import PlanCache
from disagg.plan.cast.scales import scale_problems
from disagg.protocol import messages
from disagg.protocol.agreement import all_differences, handshake_kind, handshake_problems
from disagg.protocol.codec import wanted_layout
from disagg.protocol.events import Connect, ConnectEngine, DropPeer, Effects
from disagg.protocol.messages import Hello, Message
from disagg.protocol.peers.counts import PeerCounts, RefusalKind
from disagg.protocol.peers.link import LINK_STATES, Link, PrefillRank
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT, PINGS_PER_TIMEOUT, Latest, Liveness
from disagg.protocol.rooms.offered import layers_by_owner
from disagg.protocol.status import Failure, Side
from disagg.protocol.versions import named_in, spoken
from kvpool.layout import PoolLayout, Region, Space

FIRST_PAUSE = 0.25
"""Of the shorter time-out: before a rank is dialled again that refuses this decode for now."""
KEPT_SHAPES = 64
"""Layouts whose regions others share: those of the latest."""

_Inside = tuple[tuple[Region, ...], tuple[Space, ...]]


class LinkFailed(NamedTuple):
    """The rooms of a link fail; with `asked`, only rooms already requested.
    `except_rank` is the rank that knows, or that does not listen.
    """

    link: Link
    failure: Failure
    except_rank: int | None = None
    asked: bool = False


LinkChange = Link | LinkFailed
"""A link whose ranks have all answered, so that its rooms can be asked for; or a failure."""

OfAsked = messages.ChunkReady | messages.Digests | messages.ReleaseAck | messages.Abort
"""A message about a room, from a rank of the generation that is known."""


class DecodePeers:
    """All links of one decode endpoint. Ranks are numbered over all links, closed ones too."""

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int | Group,
        effects: Effects,
        *,
        now: float,
        allow_missing: Collection[str] = (),
        cast: bool | Collection[str] = False,
    ) -> None:
        self._group = readers if isinstance(readers, Group) else None
        self._readers = len(readers.layouts) if isinstance(readers, Group) else readers
        members = self._group.layouts if self._group else (layout,)
        self.hello, self.layout = replace(hello, layout=wanted_layout(members, bool(cast))), layout
        self.links: list[Link] = []
        self.counts = PeerCounts()
        self.plans = PlanCache(allow_missing, cast=cast)
        self.liveness: Liveness[int] = Liveness(hello.timeout, now)
        self._effects = effects
        self.by_number: dict[int, PrefillRank] = {}
        """Ranks that are not disconnected."""
        self._numbers = count()
        self._alike: Latest[_Inside, PoolLayout] = Latest(KEPT_SHAPES)
        self._shortest, self._next_check = hello.timeout, 0.0

    def connect(self, link: Link, now: float) -> None:
        """Dials all ranks of a prefill and says hello."""
        self.links.append(link)
        for rank in link.ranks:
            rank.number, rank.protocol = next(self._numbers), self.hello.protocol
            self.by_number[rank.number] = rank
            self._dial(rank, now)

    def check(self, link: Link) -> None:
        """Raises RoomError for a link that is not one of these."""
        if self.by_number.get(link.ranks[0].number) is not link.ranks[0]:
            raise RoomError("the link is another endpoint's, or it was disconnected.")

    def disconnect(self, link: Link) -> None:
        """Gives a link up for good, once its rooms have failed."""
        self._drop(link)
        self.links.remove(link)
        for rank in link.ranks:
            self.send(rank, messages.Disconnect())
            del self.by_number[rank.number]
            self._effects.protocols.pop(rank.number, None)
            self._effects.append(Connect(rank.number, None))

    def notify_shutdown(self) -> None:
        """Tells every prefill that this decode is gone, so that none waits for a timeout."""
        for rank in self.by_number.values():
            self.send(rank, messages.Disconnect())

    def live(self) -> int:
        """Ranks that have answered and are not lost."""
        return sum(rank.hello is not None for rank in self.by_number.values())

    def links_by_state(self) -> dict[str, int]:
        """How many links there are in each state."""
        return dict.fromkeys(LINK_STATES, 0) | Counter(link.state for link in self.links)

    def receive(
        self, rank: PrefillRank, message: Message, now: float
    ) -> OfAsked | LinkChange | None:
        """Handles what concerns no room; returns what does, or what has become of the link."""
        if not self._listens_to(rank):
            return None
        self.liveness[rank.number] = now
        if problem := self._effects.excess(rank.number, message):
            return self.refuse(rank, problem, now)
        if isinstance(message, Hello):
            return self._handshake(rank, message)
        if isinstance(message, messages.Refuse):
            if message.final and self._says_less(rank, message.why):
                self._dial(rank, now)
                return None
            self.counts.refuse("prefill", ["told"])
            if message.final:
                return self._refuse(rank.link, [message.why], "prefill", rank.source)
            return self._pause(rank, f"it refuses this decode: {message.why}", "prefill", now)
        if not isinstance(message, messages.ToDecode):
            return self.refuse(rank, f"{type(message).__name__} is not decode's.", now)
        if rank.hello is None or rank.hello.generation != message.generation:
            return None  # of an earlier generation: nothing here waits for it
        if isinstance(message, messages.UnknownPeer):
            reason = "it no longer knows this decode: it has restarted, or has dropped it."
            return self.mark_dead(rank, reason, now, logging.INFO)  # it has said so itself
        return None if isinstance(message, messages.Pong) else message

    def tick(self, now: float) -> list[LinkFailed]:
        """Pings, dials ranks again that have refused, and gives up those silent for too long."""
        if now < self._next_check:
            return []
        self._next_check = now + self._shortest / CHECKS_PER_TIMEOUT
        failures = []
        for number in self.liveness.dead(now):
            rank = self.by_number[number]
            how = "has not answered" if rank.hello is None else "was silent"
            reason = f"it {how} for more than {self.hello.timeout:g} s."
            failures.append(self.mark_dead(rank, reason, now))
        for rank in self.by_number.values():
            if rank.link.refusal is not None:
                continue
            if rank.redial is not None and rank.redial <= now:
                rank.redial = None
                self._dial(rank, now)
            if rank.hello is not None:
                pause = min(self.hello.timeout, rank.hello.timeout) / PINGS_PER_TIMEOUT
                if now - rank.pinged >= pause:
                    rank.pinged = now
                    self.send(rank, messages.Ping(generation=rank.hello.generation))
        return [failure for failure in failures if failure is not None]

    def mark_dead(
        self, rank: PrefillRank, reason: str, now: float, level: int = logging.WARNING
    ) -> LinkFailed | None:
        """A rank is gone: its reads are given up, and it is dialled again."""
        if not self._listens_to(rank):
            return None
        self.counts.losses += rank.hello is not None
        lost = self._lose(rank, reason, level)
        self._dial(rank, now)
        return LinkFailed(rank.link, Failure("prefill", lost, "lost"), rank.source)

    def refuse(self, rank: PrefillRank, reason: str, now: float) -> LinkFailed | None:
        """A rank breaks the protocol: it is told, and may do better later."""
        if not self._listens_to(rank):
            return None
        self.counts.refuse("decode", ["breach"])
        self.send(rank, messages.Refuse([reason], final=False))
        return self._pause(rank, f"it was refused: {reason}", "decode", now)

    def _listens_to(self, rank: PrefillRank) -> bool:
        """Whether what a rank sends counts: it is neither refused for good nor hung up for now."""
        return rank.link.refusal is None and rank.redial is None

    def send(self, rank: PrefillRank, message: Message) -> None:
        """Sends to one rank, unless it is not connected now."""
        if rank.redial is None:
            self._effects.send(rank.number, message)

    def drop_room(self, link: Link, drop: messages.DropRoom, except_rank: int | None) -> None:
        """Tells the ranks of a room for which they will not be asked; those that are lost once they
        are back, before they are asked for anything.
        """
        for rank in link.ranks:
            if rank.hello is None and link.lost is not None:
                rank.untold[drop.room] = drop
            elif rank.source != except_rank:
                self.send(rank, drop)

    def _dial(self, rank: PrefillRank, now: float) -> None:
        # a new connection: nothing that was sent over the old one can arrive any more, no messages
        # pile up for a dead peer, and prefill sees a new one
        self._effects.append(Connect(rank.number, rank.address))
        self.liveness[rank.number] = now
        self._effects.protocols[rank.number] = rank.protocol
        self.send(rank, replace(self.hello, protocol=rank.protocol))

    def _says_less(self, rank: PrefillRank, refusal: str) -> bool:
        """Whether a refused hello may be said again, with the lower number that prefill names."""
        number = named_in(refusal)
        if rank.hello is not None or number is None or number >= rank.protocol:
            return False
        if number not in spoken(self.hello.protocol):
            return False
        log.info("%s speaks protocol %d: hello again", rank, number)
        rank.protocol = number
        return True

    def _pause(self, rank: PrefillRank, reason: str, side: Side, now: float) -> LinkFailed:
        """Hangs up on a rank for a pause, which doubles up to the shorter time-out."""
        longest = min(self.hello.timeout, rank.hello.timeout if rank.hello else math.inf)
        rank.pause = min(longest, max(FIRST_PAUSE * longest, 2 * rank.pause))
        lost = self._lose(rank, reason)
        self.liveness.pop(rank.number, None)
        self._effects.append(Connect(rank.number, None))
        rank.redial = now + rank.pause
        return LinkFailed(rank.link, Failure(side, lost, "refused"), rank.source, asked=True)

    def _lose(self, rank: PrefillRank, reason: str, level: int = logging.WARNING) -> str:
        link = rank.link
        again = link.lost is not None
        link.plan = rank.hello = rank.layout = None
        # what answers at this address next may be of another release
        rank.protocol = self.hello.protocol
        link.lost = lost = f"{rank} is lost: {reason}"
        log.log(logging.DEBUG if again else level, "%s", lost)
        self._effects.append(DropPeer(rank))
        return lost

    def _handshake(self, rank: PrefillRank, hello: Hello) -> LinkChange | None:
        if rank.hello is not None:
            return None  # a duplicate
        link = rank.link
        own = replace(self.hello, protocol=rank.protocol)
        if problems := handshake_problems(hello, own, own):
            self.counts.refuse("decode", [handshake_kind(hello, own)])
            return self._refuse(link, problems, "decode")
        rank.hello = hello
        for drop in rank.untold.values():
            self.send(rank, drop)
        rank.untold.clear()
        if hello.timeout < self._shortest:
            self._shortest, self._next_check = hello.timeout, 0.0
        hellos = [answer for answer in link.hellos if answer is not None]
        if len(hellos) < len(link.ranks):
            return None
        change = self._plan(link, hellos)
        if change is link and link.lost is not None:
            log.info("%s is back", rank)
            link.lost = None
        return change

    def _plan(self, link: Link, hellos: Sequence[Hello]) -> LinkChange:
        """Plans the transfer, now that every rank has answered."""
        before, own = self.plans.seconds, self.hello.conventions
        problems = all_differences((hello.conventions for hello in hellos), own)
        kinds: list[RefusalKind] = ["conventions"] if problems else []
        try:
            layouts = [self._layout(rank, hello) for rank, hello in zip(link.ranks, hellos)]
            plan = self.plans.plan(layouts, self.layout, self._group)
        except ValueError as error:  # LayoutError and IncompatibleLayouts among them
            if isinstance(error, IncompatibleLayouts) and not problems:
                link.error = error
            self.counts.refuse("decode", [*kinds, "layout"])
            return self._refuse(link, [*problems, str(error)], "decode")
        if plan.cast is not None:
            problems += scale_problems(
                plan.cast.arrival, [hello.conventions for hello in hellos], own
            )
        if problems:
            self.counts.refuse("decode", ["conventions"])
            return self._refuse(link, problems, "decode")
        link.plan, link.plan_seconds = plan, self.plans.seconds - before
        if alone := {name for hello in hellos for name in hello.conventions.keys() ^ own.keys()}:
            names = ", ".join(sorted(alone))
            log.info("%s: not compared, as only one side gives it: %s", link.ranks[0], names)
        every = dict.fromkeys(range(len(layouts)), self._readers)
        link.asks = every if self._group is None else plan.asks
        link.layers = {source: layers_by_owner(layouts[source]) for source in link.asks}
        for rank in link.ranks:
            rank.pause = 0.0
        link.unconnected = set(plan.contributors())
        for source in link.unconnected:
            self._effects.append(ConnectEngine(link.ranks[source], hellos[source]))
        return link

    def _layout(self, rank: PrefillRank, hello: Hello) -> PoolLayout:
        """A rank's layout, read once; what is equal in several is kept once. Raises LayoutError."""
        if rank.layout is None:
            rank.layout = layout = PoolLayout.from_msgpack(hello.layout)
            inside = layout.regions, layout.spaces
            self._alike[inside] = alike = self._alike.get(inside, layout)
            layout.share(alike)
            rank.hello = replace(hello, layout=b"")
        return rank.layout

    def _refuse(
        self, link: Link, reasons: Sequence[str], side: Side, except_rank: int | None = None
    ) -> LinkFailed:
        link.refusal, link.plan = "\n".join(reasons), None
        refusal = messages.Refuse([*reasons])
        for rank in link.ranks:
            if rank.source != except_rank:
                self.send(rank, refusal)
        self._drop(link)
        return LinkFailed(link, Failure(side, link.refusal, "refused"))

    def _drop(self, link: Link) -> None:
        """Stops to wait for any rank of a link, and to read from it."""
        for rank in link.ranks:
            self.liveness.pop(rank.number, None)
            self._effects.append(DropPeer(rank))
