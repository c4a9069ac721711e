"""Links that fail while bytes are on their way: the room is right or fails with its reason within
its bound, both sides have their pages back, others go on, and the link recovers by itself.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from disagg import KVPoll
from tests.faults.orders import Course
from tests.faults.world import Late
from tests.hosts.network import Network
from tests.hosts.world import HostWorld

ENGINES = "nixl", "mooncake"
RATE = "40mbit"
"""At which a whole request takes 1.7 s."""
PEER_TIMEOUT, LEASE, READ_TIMEOUT = 5.0, 20.0, 10.0
FENCE = 5.0
"""Seconds that engine `nixl` gives reads of a lost peer before it destroys their agent."""
SLACK = 3.0
"""Seconds for a busy machine."""
SMALL = Course(tokens=30, salt=9)
LONG_WAYS = [("both ways", 15.0), ("to prefill", 12.0), ("from prefill", 12.0), ("unplugged", 12.0)]


class Link(NamedTuple):
    """How the link of p0's host, or another's, fails and comes back."""

    network: Network
    number: int = 0

    @property
    def host(self):
        return self.network.hosts[self.number]

    def cut(self, way):
        if way in ("both ways", "to prefill"):
            self.network.deafen(self.host)
        if way in ("both ways", "from prefill"):
            self.network.mute(self.host)
        if way == "unplugged":
            self.network.unplug(self.host)

    def mend(self, way):
        if way == "unplugged":
            self.network.plug(self.host)
        else:
            self.network.unmute(self.host)
            self.network.rate(self.host, RATE)


@contextmanager
def joined(engine):
    """A prefill p0, whose link fails, and p1; decodes d0 and d1; all connected, at a slow rate."""
    limits = {"peer_timeout": PEER_TIMEOUT, "lease": LEASE, "read_timeout": READ_TIMEOUT}
    with Network(4) as network:
        world = HostWorld(network, engine, **limits)
        try:
            world.ensure()
            for host in network.hosts:
                network.rate(host, RATE)
            yield world
            world.close()
        finally:
            world.kill()


def others_go_on(world, links=("p1",), decodes=("d0", "d1")):
    """New rooms of those whose links are whole succeed."""
    rooms = [world.order(link, [decode], SMALL) for link in links for decode in decodes]
    for room in rooms:
        world.ends(room)
        assert room.succeeded(), room


def fails_in_time(world, room, since):
    """It fails on each side that lives, within `peer_timeout` and a sixteenth of it; then its pages
    come back on prefill at once, on decode when no byte can land any more.
    """
    assert world.until(room.over, PEER_TIMEOUT * 17 / 16 + FENCE + SLACK), room
    for name, (at, state, reason) in room.ended.items():
        assert state is KVPoll.Failed, room
        assert "silent" in reason or "connection" in reason or "out of reach" in reason, room
        if at - since > PEER_TIMEOUT * 17 / 16 + SLACK:
            raise Late(f"{name} noticed after {at - since:.1f} s: {room}")
    for name in room.ended:
        fence = FENCE if name[0] == "d" else 0.0
        assert room.back[name] - room.ended[name][0] <= fence + SLACK, room


def recovers(world, link="p0", decodes=("d0", "d1")):
    """Without a call: a room succeeds again, to every decode, and no page is lost."""
    # TCP sends what was lost again only after up to as long as the link was down; a read over such
    # a connection of NIXL fails, and the next one has a new connection
    until = time.monotonic() + PEER_TIMEOUT + READ_TIMEOUT + FENCE + SLACK
    for decode in decodes:
        while world.failed([(link, decode)], SMALL):
            assert time.monotonic() < until, f"{link} does not serve {decode} again"
    world.check_pages()


@pytest.mark.parametrize("way", ["both ways", "to prefill", "from prefill", "unplugged"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_that_is_down_for_2_seconds_delays_a_room(engine, way):
    with joined(engine) as world:
        link, room = Link(world.network), world.midway("p0", "d0")
        link.cut(way)
        others_go_on(world)
        world.until(lambda: False, 2.0)
        link.mend(way)
        assert world.until(room.over, PEER_TIMEOUT * 2 + SLACK), room
        if engine == "nixl":
            assert room.succeeded(), room
        elif not room.succeeded():
            # TCP may send again only after 3 s, which is when Mooncake gives a read up
            reasons = [reason for _, _, reason in room.ended.values()]
            assert all("Mooncake cannot read" in reason for reason in reasons), room
        recovers(world)


@pytest.mark.parametrize(
    ("way", "seconds"), [*LONG_WAYS, pytest.param("both ways", 60.0, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_that_is_down_for_longer_than_the_time_out_fails_its_rooms(engine, way, seconds):
    with joined(engine) as world:
        link, room = Link(world.network), world.midway("p0", "d0")
        began = time.monotonic()
        link.cut(way)
        others_go_on(world)
        fails_in_time(world, room, began)
        others_go_on(world)
        world.until(lambda: False, began + seconds - time.monotonic())
        link.mend(way)
        recovers(world)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefill_whose_host_vanishes_is_served_from_again_at_its_address(engine):
    with joined(engine) as world:
        network, room = world.network, world.midway("p0", "d0")
        began = time.monotonic()
        world.mortal.add("p0")
        network.vanish(network.hosts[0])
        others_go_on(world)
        fails_in_time(world, room, began)
        others_go_on(world)
        network.boot(network.hosts[0])
        world.ensure()
        recovers(world)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_connection_of_which_only_decode_knows_ends_when_its_prefill_is_back(engine):
    """A half-open one: the host that has it at its other end came back and has never seen it."""
    with joined(engine) as world:
        network, room = world.network, world.midway("p0", "d0")
        began = time.monotonic()
        world.mortal.add("p0")
        network.vanish(network.hosts[0])
        world.bury("p0")
        network.boot(network.hosts[0])
        world.ensure()
        fails_in_time(world, room, began)
        recovers(world)


@pytest.mark.parametrize("at_once", [True, False], ids=["back at once", "back later"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_decode_whose_host_vanishes_costs_prefill_its_room_alone(engine, at_once):
    with joined(engine) as world:
        network, room = world.network, world.midway("p0", "d0")
        began = time.monotonic()
        world.mortal.add("d0")
        network.vanish(network.hosts[2])
        world.bury("d0")
        others_go_on(world, ("p0", "p1"), ("d1",))
        if at_once:
            network.boot(network.hosts[2])
            world.ensure()
        fails_in_time(world, room, began)
        if not at_once:
            network.boot(network.hosts[2])
            world.ensure()
        recovers(world)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_handshake_of_which_one_half_is_lost_is_made_again(engine):
    with joined(engine) as world:
        link = Link(world.network)
        link.cut("from prefill")
        world.tell("d0", "reconnect", "p0", world.addresses("p0"))
        room = world.order("p0", ["d0"], SMALL, offered=False)
        assert world.until(room.over, PEER_TIMEOUT * 17 / 16 + SLACK), room
        assert "has not answered for more than 5 s" in room.ended["d0"][2]
        others_go_on(world)
        link.mend("from prefill")
        recovers(world)
