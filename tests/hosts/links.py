"""How links fail and come back, and what must hold then."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from disagg import KVPoll
from tests.faults.orders import Course
from tests.faults.run import unexpected
from tests.faults.world import Late, Room
from tests.faults.worlds import REPEATS
from tests.hosts.network import Host, Network
from tests.hosts.world import HostWorld

ENGINES = "nixl", "mooncake"
RATE = "40mbit"
"""At which a whole request takes 1.7 s."""
PEER_TIMEOUT, LEASE, READ_TIMEOUT = 5.0, 20.0, 10.0
FENCE = 5.0
"""Seconds that engine `nixl` gives reads of a lost peer before it gives up their agent."""
SLACK = 3.0
"""Seconds for a busy machine."""
LOST = "silent", "connection", "out of reach", "restarted"
"""Of reasons for which a room fails whose peer is not there any more, or is another one."""
SMALL = Course(tokens=30, salt=9)
WAYS = "both ways", "to it", "from it", "unplugged"
"""How a host's link is cut: silently, or so that both ends see it."""


class Link(NamedTuple):
    """How the link of a host fails and comes back."""

    network: Network
    host: Host
    rate: str = RATE

    def cut(self, way: str) -> None:
        if way in ("both ways", "to it"):
            self.network.deafen(self.host)
        if way in ("both ways", "from it"):
            self.network.mute(self.host)
        if way == "unplugged":
            self.network.unplug(self.host)

    def mend(self, way: str) -> None:
        if way == "unplugged":
            self.network.plug(self.host)
        else:
            self.network.unmute(self.host)
            self.network.rate(self.host, self.rate)


@contextmanager
def joined(engine: str, rate: str = RATE, **more: Any) -> Iterator[HostWorld]:
    """Prefills p0 and p1 and decodes d0 and d1, all connected, at a slow rate."""
    usual = {"peer_timeout": PEER_TIMEOUT, "lease": LEASE, "read_timeout": READ_TIMEOUT}
    with Network(4) as network:
        world = HostWorld(network, engine, **{**usual, **more})
        try:
            world.ensure()
            for host in network.hosts:
                network.rate(host, rate)
            yield world
            world.close()
        finally:
            world.kill()


def again_if_late(test: Callable[..., None]) -> Callable[..., None]:
    """A test that is made again, twice at most, if something was only late, which a starved machine
    can also cause.
    """

    @wraps(test)
    def repeated(*arguments: Any, **keywords: Any) -> None:
        for _ in range(REPEATS):
            try:
                return test(*arguments, **keywords)
            except Late as late:
                warnings.warn(str(late), stacklevel=2)
        return test(*arguments, **keywords)

    return repeated


def others_go_on(
    world: HostWorld, links: Sequence[str] = ("p1",), decodes: Sequence[str] = ("d0", "d1")
) -> None:
    """New rooms of those whose links are whole succeed."""
    succeed(world, others(world, links, decodes))


def others(
    world: HostWorld, links: Sequence[str] = ("p1",), decodes: Sequence[str] = ("d0", "d1")
) -> list[Room]:
    """New rooms of those whose links are whole."""
    return [world.order(link, [decode], SMALL) for link in links for decode in decodes]


def succeed(world: HostWorld, rooms: Sequence[Room]) -> None:
    """They end, and succeed."""
    for room in rooms:
        world.ends(room)
        if not room.succeeded():
            raise unexpected(str(room), room)


def delayed(world: HostWorld, room: Room, engine: str) -> None:
    """It succeeds, or fails as Mooncake's reads do."""
    world.ends(room)
    if room.succeeded():
        return
    reasons = [reason for _, _, reason in room.ended.values()]
    # TCP may send again only after 3 s, which is when Mooncake gives a read up
    if engine != "mooncake" or not all("Mooncake cannot read" in reason for reason in reasons):
        raise unexpected(str(room), room)


def fails_in_time(world: HostWorld, room: Room, since: float) -> None:
    """It fails on each side that lives, within `peer_timeout` and a sixteenth of it; then its pages
    come back on prefill at once, on decode when no byte can land any more.
    """
    if not world.until(room.over, PEER_TIMEOUT * 17 / 16 + FENCE + SLACK):
        raise Late(f"not over: {room}")
    for name, (at, state, reason) in room.ended.items():
        assert state is KVPoll.Failed, room
        assert any(words in reason for words in LOST), room
        if at - since > PEER_TIMEOUT * 17 / 16 + SLACK:
            raise Late(f"{name} noticed after {at - since:.1f} s: {room}")
    for name in room.ended:
        fence = FENCE if name[0] == "d" else 0.0
        if room.back[name] - room.ended[name][0] > fence + SLACK:
            raise Late(f"{name} has its pages back late: {room}")


def recovers(world: HostWorld, link: str = "p0", decodes: Sequence[str] = ("d0", "d1")) -> None:
    """Without a call: a room succeeds again, to every decode, and no page is lost."""
    # TCP sends what was lost again only after up to as long as the link was down; a read over such
    # a connection of NIXL fails, and the next one has a new connection
    until = time.monotonic() + PEER_TIMEOUT + READ_TIMEOUT + FENCE + SLACK
    for decode in decodes:
        while world.failed([(link, decode)], SMALL):
            if time.monotonic() > until:
                raise Late(f"{link} does not serve {decode} again")
    world.check_pages()
