"""The hosts themselves: what they share, what their links do, and what is left of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hosts.namespaces import Refused, called
from tests.hosts.network import Network
from tests.processes import until

PORT = 5000


def echo(pipe, address):
    """Sends back what comes over one connection after the other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, PORT), family=family) as server:
        pipe.send(None)
        while True:
            stream, _ = server.accept()
            while data := stream.recv(1 << 20):
                stream.sendall(data)


def exchange(pipe, address):
    """Sends what it is asked to over one connection; answers with seconds until it was back, or
    with the error.
    """
    stream = None
    while (order := pipe.recv()) is not None:
        count, timeout = order
        began = time.monotonic()
        try:
            stream = stream or socket.create_connection((address, PORT), timeout)
            stream.settimeout(timeout)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left, sent = count, os.urandom(count)
            stream.sendall(sent)
            while left:
                left -= len(stream.recv(left))
            pipe.send(time.monotonic() - began)
        except OSError as error:
            pipe.send(error)


class Facts(NamedTuple):
    """What tells a host from another."""

    name: str
    boot: str
    processes: int
    files: set[str]


def facts(pipe):
    """The facts of this host."""
    folders = Path("/tmp"), Path("/dev/shm")
    for folder in folders:
        (folder / "of this host").touch()
    pipe.send(
        Facts(
            name=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text(),
            processes=len(list(Path("/proc").glob("[0-9]*"))),
            files={path.name for folder in folders for path in folder.iterdir()},
        )
    )


@pytest.fixture
def pair():
    with Network(2) as network:
        yield network


@contextmanager
def exchanging(network, ipv6=False):
    """`round trip of so many bytes within so many seconds`, from host 0 to 1 and back."""
    client, server = network.hosts[:2]
    address = server.ipv6 if ipv6 else server.ipv4
    with server.child(echo, address) as answering:
        answering.answer()
        with client.child(exchange, address) as asking:
            yield lambda count=100, timeout=20.0: asking.ask(count, timeout)


def test_hosts_share_neither_processes_nor_files_nor_a_boot(pair):
    here = Path("/proc/sys/kernel/random/boot_id").read_text()
    answers = []
    for host in pair.hosts:
        with host.child(facts) as child:
            answers.append(child.answer())
    assert [answer.name for answer in answers] == ["host0", "host1"]
    assert len({here, *(answer.boot for answer in answers)}) == 3
    for answer in answers:
        assert answer.processes <= 3  # number 1 and itself, and nothing of this machine
        assert "of this host" in answer.files
    assert not Path("/dev/shm/of this host").exists()


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_hosts_reach_each_other_and_nothing_else(pair, ipv6):
    with exchanging(pair, ipv6) as trip:
        assert trip() < 10
    for host in pair.hosts:
        for family in "-4", "-6":
            routes = called(host.command("ip", family, "route", "show", "default"))
            assert not routes


def test_a_link_has_its_rate(pair):
    pair.rate(pair.hosts[1], "10mbit")
    with exchanging(pair) as trip:
        assert trip() < 0.5
        assert 0.6 < trip(1 << 20) < 10  # 0.84 s at 10 Mbit/s, less the burst


def test_packets_are_late(pair):
    pair.disturb(delay=0.05)
    with exchanging(pair) as trip:
        trip()
        assert 0.1 <= trip() < 5
        pair.direct()
        assert min(trip() for _ in range(5)) < 0.05


def test_packets_are_lost(pair):
    with exchanging(pair) as trip:
        trip()  # the hosts know each other's cards now: of those few packets all could be lost
    pair.disturb(loss=0.2)
    with exchanging(pair) as trip:
        assert isinstance(trip(1 << 19, 120), float)
    assert sum(map(sent_again, pair.hosts)) > 20  # of some 700 packets, and more of the repeated


def sent_again(host):
    """Segments that a host has sent more than once."""
    names, numbers = (
        line.split()
        for line in called(host.command("cat", "/proc/net/snmp")).splitlines()
        if line.startswith("Tcp:")
    )
    return int(numbers[names.index("RetransSegs")])


@pytest.mark.parametrize("cut", ["deafen", "mute", "unplug"])
def test_a_link_that_is_cut_loses_nothing_but_time(pair, cut):
    server = pair.hosts[1]
    mend = {"deafen": lambda: pair.rate(server, None), "mute": lambda: pair.unmute(server)}
    with exchanging(pair) as trip:
        trip()
        getattr(pair, cut)(server)
        assert isinstance(trip(100, 0.5), TimeoutError)
        mend.get(cut, lambda: pair.plug(server))()
        assert isinstance(trip(100, 20), float)


def test_a_host_that_vanishes_says_nothing_and_comes_back_with_its_address(pair):
    server = pair.hosts[1]
    with exchanging(pair) as trip:
        trip()
        pair.vanish(server)
        assert isinstance(trip(100, 0.5), TimeoutError)
        pair.boot(server)
        with server.child(echo, server.ipv4) as answering:
            answering.answer()
            # the new host knows nothing of the old connection
            assert isinstance(trip(100, 20), ConnectionError)


def test_nothing_is_left_of_a_network():
    with Network(2) as network:
        keepers = [host.namespaces.pid for host in network.hosts]
        child = network.hosts[0].child(facts)
        child.answer()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in keepers))
    child.process.join(20)
    assert child.process.exitcode is not None
    assert not Path(network.folder).exists()
    # all devices were made inside
    assert "port0" not in called(["ip", "link", "show"])


KILLED = """
import os, signal
from tests.hosts.network import Network
network = Network(2)
print(network.folder, *(host.namespaces.pid for host in network.hosts), flush=True)
os.kill(os.getpid(), signal.{signal})
signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_nothing_is_left_of_a_run_that_is_killed(name):
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(signal=name)], capture_output=True, text=True
    )
    folder, *keepers = done.stdout.split()
    assert len(keepers) == 2, done.stderr
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in keepers))
    until(lambda: not Path(folder).exists())


def test_what_is_refused_is_said():
    with pytest.raises(Refused, match=r"privileged container.* said: .*no such device"):
        called(["ip", "link", "set", "no such device", "up"])
