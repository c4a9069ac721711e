"""Addresses to listen at and to dial: what is taken means what it says, and can be dialled."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given, strategies as st

from disagg.runtime.sockets.address import Address
from disagg.runtime.sockets.listen_address import ListenAddress
from tests.disagg.runtime.transports import ADDRESSES

PORTS = st.integers(1, 65535)
V4 = st.integers(1, 0xDFFFFFFF).map(lambda n: str(ipaddress.IPv4Address(n)))
V6 = st.integers(1, (1 << 124) - 1).map(lambda n: f"[{ipaddress.IPv6Address(n)}]")
NAMES = st.from_regex(r"[a-z]([a-z0-9.-]{0,20}[a-z])?", fullmatch=True)
VARIABLES = st.from_regex(r"\$[A-Z_][A-Z0-9_]{0,9}", fullmatch=True)
HOSTS = V4 | V6 | NAMES
# texts that are nearly addresses
NEARLY = st.builds(
    "tcp://{}:{}".format,
    st.text("0123456789abxX.:[]%*$-_", max_size=16) | HOSTS,
    st.text("0123456789*+-rank", max_size=8) | PORTS.map(str),
)


def numeric(host: str) -> str | None:
    """What the system takes a host for if it is an IP address in any spelling; None for a name."""
    try:
        infos = socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    return str(infos[0][4][0])


@given(NEARLY)
def test_what_is_taken_to_dial_is_one_host_and_one_port(text):
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert 1 <= address.port <= 65535
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    assert (address.host, address.port) == (host.strip("[]"), int(port))
    taken = numeric(address.host)
    if taken is None:
        assert "[" not in host and ":" not in host
        return
    ip = ipaddress.ip_address(taken.partition("%")[0])
    # no other spelling: 1.2 is 1.0.0.2 to the system
    assert ip == ipaddress.ip_address(address.host.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    assert not (ip.is_unspecified or ip.is_multicast or str(ip) == "255.255.255.255")


@given(HOSTS, PORTS)
def test_every_host_and_port_can_be_dialled(host, port):
    address = Address.parse(f"tcp://{host}:{port}")
    assert (address.host, address.port) == (host.strip("[]"), port)


@given(HOSTS | VARIABLES | st.just("*"), PORTS, st.integers(0, 300), st.sampled_from("-+1*"))
def test_ports_are_one_a_range_a_ranks_or_any(host, port, more, kind):
    last = min(port + more, 65535)
    ports, tried = {
        "-": (f"{port}-{last}", range(port, last + 1)),
        "+": (f"{port}+rank", None),
        "1": (f"{port}", range(port, port + 1)),
        "*": ("*", range(1)),
    }[kind]
    address = ListenAddress.parse(f"tcp://{host}:{ports}")
    if tried is None:
        with pytest.raises(ValueError, match=f"connectors add.*such as {port}"):
            address.ports()
    else:
        assert address.ports() == tried
    assert ListenAddress.parse(str(address)) == address
    assert (address.host == "0.0.0.0") == (host in ("*", "0.0.0.0"))


@given(NEARLY | st.text(max_size=20))
def test_what_is_taken_to_listen_at_is_written_as_it_is_read(text):
    try:
        address = ListenAddress.parse(text)
    except ValueError:
        return
    assert ListenAddress.parse(str(address)) == address


@given(PORTS, st.integers(0, 70_000))
def test_the_number_of_a_rank_is_added_to_its_port(port, number):
    address = ListenAddress.parse(f"tcp://10.0.0.1:{port}+rank")
    if port + number > 65535:
        with pytest.raises(ValueError, match=f"port {port + number} of rank {number}: a port is"):
            address.of_rank(number)
    else:
        assert str(address.of_rank(number)) == f"tcp://10.0.0.1:{port + number}"


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:9", "tcp://a:1-4", "tcp://*:*", "ipc:///run/a"])
def test_an_address_without_a_ranks_port_is_every_ranks(text):
    address = ListenAddress.parse(text)
    assert address.of_rank(3) is address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://fd00::2:1", "an address is ipc://PATH or tcp://HOST:PORT"),
        ("tcp://10.0.0.1", "an address is"),
        ("tcp://10.0.0.1:", "an address is"),
        ("tcp://10.0.0.1:9+1", "an address is"),
        ("tcp://10.0.0.1:rank", "an address is"),
        ("tcp://10.0.0.1:*+rank", "an address is"),
        ("tcp://10.0.0.1:0+rank", "from 1 on, the lower one first"),
        ("tcp://10.0.0.1:0-5", "from 1 on, the lower one first"),
        ("tcp://10.0.0.1:5-4", "ports 5-4: from 1 on, the lower one first"),
        ("tcp://10.0.0.1:1-65536", "a port is at most 65535"),
        ("tcp://a b:1", "'a b' is no host name"),
        ("tcp://[10.0.0.1]:1", "is no IPv6 address"),
        ("tcp://[]:1", "is no IPv6 address"),
        ("tcp://$:1", "is no variable of the environment"),
        ("tcp://$1A:1", "is no variable of the environment"),
        ("tcp://$A-B:1", "is no variable of the environment"),
        ("ipc://", "a unix socket is ipc://PATH"),
        (f"ipc:///{'a' * 107}", "at most 107 bytes"),
    ],
)
def test_what_is_no_address_to_listen_at_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        ListenAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://0.0.0.0:5", "0.0.0.0 stands for all addresses .* leads a peer to itself"),
        ("tcp://[::]:5", ":: stands for all addresses"),
        ("tcp://[::ffff:0.0.0.0]:5", "stands for all addresses"),
        ("tcp://*:5", "is no host name"),
        ("tcp://0:5", "0 is no IP address"),
        ("tcp://0x0:5", "0x0 is no IP address"),
        ("tcp://1.2:5", "1.2 is no IP address"),
        ("tcp://224.0.0.1:5", "is no address of one host"),
        ("tcp://255.255.255.255:5", "is no address of one host"),
        ("tcp://$A:5", "is no host name"),
        ("tcp://10.0.0.1:5-6", "an address is"),
        ("tcp://10.0.0.1:5+rank", "an address is"),
        ("tcp://10.0.0.1:0", "it names no port to dial"),
    ],
)
def test_what_leads_to_no_one_host_is_not_dialled(text, words):
    with pytest.raises(ValueError, match=words):
        Address.parse(text)


@pytest.mark.parametrize(
    ("value", "hosts"),
    [
        ("10.0.0.7", ["10.0.0.7"]),
        ("fd00::7", ["fd00::7"]),
        ("[fd00::7]", ["fd00::7"]),
        ("gpu-7.example", ["gpu-7.example"]),
        ("lo", ["127.0.0.1", "::1"]),
    ],
)
def test_a_variable_holds_an_address_a_name_or_an_interface(value, hosts, monkeypatch):
    monkeypatch.setenv("POD_IP", value)
    if value == "lo" and "tcp://[::1]:*" not in ADDRESSES:
        hosts = hosts[:1]
    for text in ("tcp://$POD_IP:1", "tcp://${POD_IP}:1"):
        assert ListenAddress.parse(text).hosts() == hosts


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "the environment has no POD_IP"),
        ("", "the environment has no POD_IP"),
        ("$HOME", "POD_IP='\\$HOME' of the environment: \\$HOME is a variable again"),
        ("10.0.0.1:80", "POD_IP='10.0.0.1:80' of the environment: "),
        ("a b", "POD_IP='a b' of the environment: 'a b' is no host name"),
    ],
)
def test_a_variable_that_holds_no_host_is_refused_by_name(value, words, monkeypatch):
    monkeypatch.delenv("POD_IP", raising=False)
    if value is not None:
        monkeypatch.setenv("POD_IP", value)
    with pytest.raises(ValueError, match=words):
        ListenAddress.parse("tcp://$POD_IP:1").hosts()
