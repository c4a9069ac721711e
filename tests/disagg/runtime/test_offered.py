"""What an endpoint offers can be dialled by its peers, or is refused when it is made."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from disagg import PrefillEndpoint, create_engine
from disagg.engines.base import TransferError
from disagg.host.interfaces import interface_addresses, interface_names, is_loopback
from disagg.runtime.sockets.offered import check_engine_host
from tests.disagg.engines.owners import engine_of
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import PrefillProcess, decode_side, joined, pool, prefill_side
from tests.disagg.runtime.transports import ADDRESSES
from tests.ports import free_port
from tests.processes import python

OPEN = {"insecure": True}
OUTWARD = [
    address
    for name in interface_names()
    for address in interface_addresses(name)
    if not is_loopback(address)
]
needs_mooncake = pytest.mark.skipif("mooncake" not in ENGINES, reason="Mooncake is not installed")
V6 = "tcp://[::1]:*" in ADDRESSES
ALL = ["tcp://*:*", "tcp://0.0.0.0:*", *(["tcp://[::]:*"] if V6 else [])]
# an address that is no host's (RFC 5737)
ELSEWHERE = "tcp://203.0.113.7:4000"


def link_local():
    """A row of the kernel's table about an address of a link."""
    with open("/proc/self/net/if_inet6") as lines:
        rows = [line.split() for line in lines]
    return next((row for row in rows if row[3] == "20"), None)


needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode != 0,
    reason="this host lets no process have a network of its own",
)


def arrives_at(bind, **options):
    """The address of a prefill in another process, from which a room has come."""
    with PrefillProcess(bind, **OPEN, **options) as prefill, decode_side(**OPEN) as side:
        side[0].connect([prefill.address], timeout=30)
        prefill.hands_over("r", side)
        return prefill.address


def offered(bind, **options):
    """What a prefill offers, which is made and closed."""
    with prefill_side(bind, **OPEN, **options) as (prefill, _):
        return prefill.address


@pytest.mark.parametrize("bind", ALL)
def test_an_endpoint_at_all_addresses_is_offered_at_one_that_others_reach(bind):
    if not OUTWARD:
        with pytest.raises(ValueError, match="it has no address but those of loopback"):
            offered(bind)
        return
    host, _, port = arrives_at(bind).removeprefix("tcp://").rpartition(":")
    assert host.strip("[]") in OUTWARD and 1 <= int(port) <= 65535


def test_an_interface_a_variable_and_a_name_are_places_to_listen(monkeypatch):
    monkeypatch.setenv("POD_IP", "127.0.0.3")
    assert arrives_at("tcp://lo:*").startswith("tcp://127.0.0.1:")
    assert offered("tcp://${POD_IP}:*").startswith("tcp://127.0.0.3:")
    assert arrives_at("tcp://localhost:*").startswith(("tcp://127.0.0.1:", "tcp://[::1]:"))


def test_each_address_of_a_host_has_ports_of_its_own():
    port = free_port()
    places = [f"tcp://127.0.0.{n}:{port}" for n in (2, 3, 4)]
    with ExitStack() as stack:
        for place in places:
            prefill, _ = stack.enter_context(prefill_side(place, **OPEN))
            assert prefill.address == place
            decode = stack.enter_context(decode_side(**OPEN))[0]
            decode.connect([place], timeout=20)


def test_the_first_free_port_of_a_range_is_taken_and_a_full_one_is_refused():
    first = free_port()
    place = f"tcp://127.0.0.5:{first}-{first + 2}"
    with ExitStack() as stack:
        taken = [stack.enter_context(prefill_side(place, **OPEN))[0].address for _ in range(3)]
        assert taken == [f"tcp://127.0.0.5:{first + n}" for n in range(3)]
        with pytest.raises(ValueError, match=f"'{place}': no port of {first}-{first + 2} is free"):
            offered(place)
        with pytest.raises(ValueError, match=f"'{taken[0]}': .*Address already in use"):
            offered(taken[0])
    assert offered(place) == taken[0]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("tcp://127.0.0.1:29100+rank", "knows no number of its rank, which connectors add"),
        ("tcp://203.0.113.7:*", "Cannot assign requested address"),
        ("tcp://eth0.4711:*", "eth0.4711 is no IP address"),
        ("tcp://$KVPOOL_NOWHERE:*", "the environment has no KVPOOL_NOWHERE"),
    ],
)
def test_a_place_that_this_host_does_not_have_is_refused(place, words):
    with pytest.raises(ValueError, match=words) as refused:
        offered(place)
    assert str(refused.value).startswith(f"bind {place!r}: ")


def test_a_name_that_leads_peers_back_to_themselves_is_refused(monkeypatch):
    # as Debian has it in /etc/hosts: 127.0.1.1 and the host's own name
    names = {"gpu-7": [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]}
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: names.get(host) or resolve(host, *a, **k)
    )
    with pytest.raises(ValueError, match=r"gpu-7 is 127\.0\.1\.1 here, .* to itself: say which in"):
        offered("tcp://gpu-7:*")
    assert offered("tcp://gpu-7:*", advertise="tcp://10.0.0.7:*").startswith("tcp://10.0.0.7:")


def test_an_address_that_means_another_host_on_each_link_is_refused():
    if not (V6 and link_local()):
        with pytest.raises(ValueError, match=r"Cannot assign|not supported"):
            offered("tcp://[fe80::1%lo]:*")
        return
    digits, *_, interface = link_local()
    host = ":".join(digits[n : n + 4] for n in range(0, 32, 4))
    with pytest.raises(ValueError, match="means another host on each link: say which in advertise"):
        offered(f"tcp://[{host}%{interface}]:*")


# advertise


def test_peers_dial_what_is_advertised():
    with joined(OPEN | {"bind": "tcp://127.0.0.1:*", "advertise": "tcp://localhost:*"}, **OPEN) as (
        prefill, *_,
    ):  # fmt: skip
        assert prefill.address.startswith("tcp://localhost:")


def test_an_advertised_address_is_taken_as_it_is_and_its_host_may_be_a_variable(monkeypatch):
    monkeypatch.setenv("NODE_IP", "fd00::7")
    bind = f"tcp://127.0.0.1:{free_port()}"
    for advertise, address in {
        "tcp://203.0.113.7:31000": "tcp://203.0.113.7:31000",
        "tcp://gpu-7.example:*": f"tcp://gpu-7.example:{bind.rpartition(':')[2]}",
        "tcp://$NODE_IP:31000": "tcp://[fd00::7]:31000",
        "tcp://lo:31000": "tcp://127.0.0.1:31000",
    }.items():
        assert offered(bind, advertise=advertise) == address


@pytest.mark.parametrize(
    ("bind", "advertise", "words"),
    [
        ("tcp://127.0.0.1:*", "tcp://*:*", "0.0.0.0 stands for all addresses"),
        ("tcp://127.0.0.1:*", "tcp://[::]:9", ":: stands for all addresses"),
        ("tcp://127.0.0.1:*", "tcp://10.0.0.7:1-4", "peers dial one port"),
        ("tcp://127.0.0.1:*", "tcp://10.0.0.7:1+rank", "knows no number of its rank"),
        ("tcp://127.0.0.1:*", "ipc:///run/a", "known by none but tcp://HOST:PORT"),
        ("tcp://127.0.0.1:*", "10.0.0.7", "an address is ipc://PATH or tcp://HOST:PORT"),
        (None, "tcp://10.0.0.7:*", "which is known by no other address"),
    ],
)
def test_what_peers_cannot_dial_is_not_advertised(bind, advertise, words):
    with pytest.raises(ValueError, match=words) as refused:
        offered(bind, advertise=advertise)
    assert str(refused.value).startswith(f"advertise={advertise!r}: ")


# hosts that this one is not: in a network namespace of their own

NAMESPACE = """
import subprocess, sys
from disagg.host.interfaces import *
import socket
families = (socket.AF_INET6, socket.AF_INET)

def refusal():
    try:
        return outward_address(families)
    except ValueError as error:
        return str(error)

def ip(*words):
    subprocess.run(["ip", *words], check=True)

ip("link", "set", "lo", "up")
assert refusal() == "it has no address but those of loopback", refusal()
ip("link", "add", "one", "type", "veth", "peer", "name", "two")
for name, address in (("one", "10.1.0.1/24"), ("two", "10.2.0.1/24")):
    ip("link", "set", name, "up")
    ip("address", "add", address, "dev", name)
    if name == "one":
        assert refusal() == "10.1.0.1", refusal()
assert refusal() == "it has no default route, and several addresses: 10.1.0.1, 10.2.0.1", refusal()
ip("route", "add", "default", "via", "10.2.0.9")
assert refusal() == "10.2.0.1", refusal()
assert is_own("10.1.0.1") and is_own("127.0.0.7") and not is_own("10.1.0.9")
"""


@needs_namespaces
def test_of_several_addresses_that_of_the_default_route_counts_or_none(tmp_path):
    script = tmp_path / "namespace.py"
    script.write_text(NAMESPACE)
    made = subprocess.run(["unshare", "-rn", sys.executable, script], stderr=subprocess.PIPE)
    assert made.returncode == 0, made.stderr.decode()


# engines


@needs_mooncake
@pytest.mark.parametrize("bind", [None, "tcp://127.0.0.2:*", "tcp://lo:*"])
def test_an_engine_is_offered_where_its_endpoint_is(bind):
    with (
        PrefillProcess(bind, engine="mooncake", **OPEN) as prefill,
        decode_side("mooncake", **OPEN) as side,
    ):
        link = side[0].connect([prefill.address], timeout=30)
        host = create_engine("mooncake").offered_host(link.hellos[0].metadata)
        assert host == (prefill.address.split(":")[1].removeprefix("//") if bind else "127.0.0.1")
        prefill.hands_over("r", side)


def by_name(engine, layout):
    """In place of an engine, one that was given where peers reach it."""
    return create_engine("mooncake", hostname="127.0.0.2"), layout


@needs_mooncake
def test_bytes_come_from_another_process_at_the_host_name_that_its_engine_was_given():
    with (
        PrefillProcess("tcp://127.0.0.3:*", engine="mooncake", lie=by_name, **OPEN) as prefill,
        decode_side("mooncake", **OPEN) as side,
    ):
        link = side[0].connect([prefill.address], timeout=30)
        metadata = link.hellos[0].metadata
        assert create_engine("mooncake").offered_host(metadata) == "127.0.0.2"
        prefill.hands_over("r", side)


def over_ipv6(engine, layout):
    """An engine whose package was told to use IPv6 before it was loaded."""
    os.environ["MC_USE_IPV6"] = "1"
    return create_engine("mooncake"), layout


DECODE = """
import sys
from tests.disagg.runtime.sides import arrives, decode_side
with decode_side("mooncake", insecure=True) as (decode, dest, table):
    decode.connect(sys.argv[1:], timeout=30)
    decode.receive("r", table)
    arrives(decode, "r", dest, table)
"""


@needs_mooncake
def test_bytes_come_over_ipv6_where_both_packages_were_told_to():
    bind = "tcp://[::1]:*"
    if not V6:
        with pytest.raises(ValueError, match=r"Cannot assign|not supported"):
            offered(bind)
        return
    with PrefillProcess(bind, lie=over_ipv6, **OPEN) as prefill:
        prefill.ask("r")
        python("-c", DECODE, prefill.address, MC_USE_IPV6="1")
    engine = create_engine("mooncake")
    with pytest.raises(ValueError, match=r"hostname \[::1\]: Mooncake needs .* MC_USE_IPV6=1 for"):
        PrefillEndpoint(pool().layout, engine, bind, **OPEN)
    engine.close()


@needs_mooncake
@pytest.mark.parametrize("hostname", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_an_engine_at_loopback_is_refused_where_its_endpoint_is_for_other_hosts(hostname):
    engine = create_engine("mooncake", hostname=hostname)
    with pytest.raises(ValueError) as refused:
        PrefillEndpoint(
            pool().layout, engine, "tcp://127.0.0.1:*", advertise="tcp://203.0.113.7:*", **OPEN
        )
    text = str(refused.value)
    assert f"engine mooncake: hostname={hostname!r} leads a peer on another host to itself" in text
    assert "its endpoint is offered at 203.0.113.7." in text
    engine.close()


@needs_mooncake
def test_a_peer_is_told_that_a_prefill_elsewhere_offers_its_engine_at_loopback():
    """As a prefill of an earlier version does."""
    engine = create_engine("mooncake")
    engine.register([])
    metadata = engine.metadata()
    with pytest.raises(TransferError) as refused:
        check_engine_host(ELSEWHERE, engine, metadata)
    assert str(refused.value) == (
        "its engine mooncake is offered at 127.0.0.1, which is this host; its endpoint is at "
        "203.0.113.7. Leave hostname out of its engine options, or give another."
    )
    # this host by another of its addresses, a tunnel, and within the host
    own = [f"tcp://[{a}]:1" if ":" in a else f"tcp://{a}:1" for a in OUTWARD]
    for address in (*own, "tcp://127.0.0.1:1", "tcp://localhost:1", "ipc:///run/a"):
        check_engine_host(address, engine, metadata)
    engine.close()


@pytest.mark.parametrize("name", ["local", "nixl"])
def test_engines_that_find_their_peers_name_no_host(name):
    with engine_of(name, np.zeros(4096, dtype=np.uint8)) as engine:
        assert engine.offered_host(engine.metadata()) is None
        check_engine_host(ELSEWHERE, engine, engine.metadata())
