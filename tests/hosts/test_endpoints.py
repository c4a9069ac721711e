"""Endpoints on hosts: TLS, both versions of IP, and links of several shapes. The oracle of
`tests.faults` compares every byte.
"""

from __future__ import annotations

from itertools import product

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.runtime.keys import write_keys
from tests import oracle
from tests.faults.orders import Course
from tests.hosts.network import Network
from tests.hosts.world import WHOLE, HostWorld
from tests.pools import mla

ENGINES = "nixl", "mooncake"
PAIRS = [*product(("p0", "p1"), ("d0", "d1"))]
SHAPES = {
    "as fast as it goes": (None, {}),
    "100 Mbit per second": ("100mbit", {}),
    "10 Mbit per second": ("10mbit", {}),
    "50 ms later": (None, {"delay": 0.05}),
    "1 percent lost": (None, {"loss": 0.01}),
}
PART = Course(tokens=40, salt=5, stops=(16,))
"""A request of 1.25 MiB, in two chunks."""


@pytest.fixture(scope="module", params=ENGINES)
def world(request):
    with Network(4) as network:
        made = HostWorld(network, request.param, lease=60, peer_timeout=30, read_timeout=30)
        try:
            made.ensure()
            yield made
            made.close()
        finally:
            made.kill()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives_over_a_link(world, shape):
    rate, disturbances = SHAPES[shape]
    network = world.network
    for host in network.hosts:
        network.rate(host, rate)
    if disturbances:
        network.disturb(**disturbances)
    course = WHOLE if rate is None and not disturbances else PART
    rooms = [world.order(prefill, [decode], course) for prefill, decode in PAIRS]
    for room in rooms:
        world.ends(room)
        assert room.succeeded(), room
    network.direct()
    world.check_pages()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_byte_arrives_where_hosts_have_ipv6_addresses_only(engine):
    with Network(2, ipv4=False) as network:
        places = {"p0": 0, "p1": 0, "d0": 1, "d1": 1}
        made = HostWorld(network, engine, places=places, lease=60, peer_timeout=30)
        try:
            made.ensure()
            assert not made.failed(PAIRS, PART)
            made.check_pages()
            made.close()
        finally:
            made.kill()


def offer(pipe, bind, keys):
    """A prefill with engine `local`, which offers a room and says how it ended."""
    pool = mla()
    with PrefillEndpoint(pool.layout, create_engine("local"), bind, keys=keys) as endpoint:
        pipe.send(endpoint.address)
        endpoint.send("r", oracle.filled(pool, 20))
        pipe.send((endpoint.wait("r", 30), str(endpoint.failure("r"))))


def ask(pipe, address, keys):
    """A decode with engine `local`, which asks for it."""
    pool = mla()
    with DecodeEndpoint(pool.layout, create_engine("local"), keys=keys) as endpoint:
        endpoint.connect([address], timeout=30)
        endpoint.receive("r", oracle.place(pool, 20))
        pipe.send((endpoint.wait("r", 30), str(endpoint.failure("r"))))


def test_engine_local_refuses_what_is_on_another_host():
    with Network(2) as network:
        keys = f"{network.folder}/keys"
        write_keys(keys)
        here, there = network.hosts
        with (
            here.child(offer, f"tcp://{here.ipv4}:*", keys) as prefill,
            there.child(ask, prefill.answer(), keys) as decode,
        ):
            for side in decode, prefill:
                state, reason = side.answer()
                assert state is KVPoll.Failed
                assert "the peer is on another host. Use engine nixl" in reason
