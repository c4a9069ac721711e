"""Links that fail in the midst of 256 MiB. One test at a time: each fills four pools of 324 MiB."""

from __future__ import annotations

import time

import pytest

from tests.hosts.links import (
    ENGINES,
    PEER_TIMEOUT,
    Link,
    again_if_late,
    delayed,
    fails_in_time,
    joined,
    others,
    recovers,
    succeed,
)
from tests.hosts.world import large

RATE = "400mbit"
PARTS = 500
"""After which a link fails: of 257 MiB 62 have come."""


@pytest.mark.parametrize(
    "outages", [(2.0, 15.0), pytest.param((60.0,), marks=pytest.mark.long)], ids=["2, 15 s", "60 s"]
)
@pytest.mark.parametrize("engine", ENGINES)
@again_if_late
def test_a_link_that_is_down_in_the_midst_of_256_mib(engine, outages):
    with joined(engine, RATE, pool=large) as world:
        link = Link(world.network, world.host("p0"), RATE)
        for seconds in outages:
            room = world.midway("p0", "d0", parts=PARTS)
            began = time.monotonic()
            link.cut("both ways")
            rooms = others(world)
            if seconds > PEER_TIMEOUT:
                fails_in_time(world, room, began)
            world.until(lambda: False, began + seconds - time.monotonic())
            link.mend("both ways")
            succeed(world, rooms)
            if seconds < PEER_TIMEOUT:
                delayed(world, room, engine)
            recovers(world)
