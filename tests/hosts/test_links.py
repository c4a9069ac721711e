"""Links that fail while bytes are on their way: the room is right or fails with its reason within
its bound, both sides have their pages back, others go on, and the link recovers by itself.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from disagg.engines.nixl import child
from disagg.protocol.status import KVPoll
from tests.faults.world import Late
from tests.hosts.links import (
    ENGINES,
    PEER_TIMEOUT,
    SLACK,
    SMALL,
    WAYS,
    Link,
    again_if_late,
    delayed,
    fails_in_time,
    joined,
    others,
    others_go_on,
    recovers,
    succeed,
)

LONG_WAYS = [("both ways", 15.0), ("to it", 12.0), ("from it", 12.0), ("unplugged", 12.0)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ENGINES)
@again_if_late
def test_a_link_that_is_down_for_2_seconds_delays_a_room(engine, way):
    with joined(engine) as world:
        link, room = Link(world.network, world.host("p0")), world.midway("p0", "d0")
        link.cut(way)
        rooms = others(world)
        world.until(lambda: False, 2.0)
        link.mend(way)
        succeed(world, rooms)
        delayed(world, room, engine)
        recovers(world)


@pytest.mark.parametrize(
    ("way", "seconds"), [*LONG_WAYS, pytest.param("both ways", 60.0, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("engine", ENGINES)
@again_if_late
def test_a_link_that_is_down_for_longer_than_the_time_out_fails_its_rooms(engine, way, seconds):
    with joined(engine) as world:
        link, room = Link(world.network, world.host("p0")), world.midway("p0", "d0")
        began = time.monotonic()
        link.cut(way)
        others_go_on(world)
        fails_in_time(world, room, began)
        others_go_on(world)
        world.until(lambda: False, began + seconds - time.monotonic())
        link.mend(way)
        recovers(world)


@pytest.mark.parametrize("engine", ENGINES)
@again_if_late
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
@again_if_late
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
@again_if_late
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


def processes_that_serve(host):
    """Those on a host that engine `nixl` has started."""
    network = os.readlink(f"/proc/{host.namespaces.pid}/ns/net")
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            serves = child.__name__.encode() in command.read_bytes()
            if serves and os.readlink(command.parent / "ns" / "net") == network:
                yield int(command.parent.name)


@again_if_late
def test_a_process_that_serves_reads_ends_and_its_prefill_goes_on():
    """As UCX may let it, when a reader vanishes."""
    with joined("nixl") as world:
        room = world.midway("p0", "d0")
        (pid,) = processes_that_serve(world.host("p0"))
        os.kill(pid, signal.SIGSEGV)
        others_go_on(world)
        for state, reason in world.ends(room).values():
            assert state is KVPoll.Failed
            assert "that served reads" in reason or "read from rank 0" in reason, reason
        recovers(world)
        (another,) = processes_that_serve(world.host("p0"))
        assert another != pid


@pytest.mark.parametrize("engine", ENGINES)
@again_if_late
def test_a_handshake_of_which_one_half_is_lost_is_made_again(engine):
    with joined(engine) as world:
        link = Link(world.network, world.host("p0"))
        link.cut("from it")
        world.tell("d0", "reconnect", "p0", world.addresses("p0"))
        room = world.order("p0", ["d0"], SMALL, offered=False)
        if not world.until(room.over, PEER_TIMEOUT * 17 / 16 + SLACK):
            raise Late(f"not over: {room}")
        assert "has not answered for more than 5 s" in room.ended["d0"][2]
        others_go_on(world)
        link.mend("from it")
        recovers(world)
