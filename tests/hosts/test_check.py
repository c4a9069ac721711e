"""`kvpool check` between two hosts: each engine's way, and what a link does to it."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from disagg.runtime.keys import write_keys
from tests.disagg.cli.check.parts import contract, reason_of, serving, told_by_process
from tests.hosts.network import Network

PORT = 29100
ENGINES = "nixl", "mooncake"


@contextmanager
def two_hosts():
    """Their network, and the path of keys and contracts that both see."""
    with Network(2) as network:
        write_keys(f"{network.folder}/keys")
        yield network, network.folder


@contextmanager
def prefill_part(network, engine):
    """On the first host; what the second one's check is to be told."""
    folder, (there, here) = network.folder, network.hosts
    for name, shape in (("prefill", {"tp": 2}), ("decode", {"page": 8, "serves": "decode"})):
        with open(f"{folder}/{name}", "w") as file:
            file.write(contract(engine, **shape).to_json())
    keys = "--settings", json.dumps({"keys": f"{folder}/keys"})
    place = f"tcp://{there.ipv4}:{PORT}"
    prefill = f"{folder}/prefill"
    with serving(prefill, *keys, place=place, before=there.command()) as addresses:
        assert addresses == [f"tcp://{there.ipv4}:{PORT + number}" for number in (0, 1)]
        yield [prefill, f"{folder}/decode", "--from", place, *keys], here.command()


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_move_between_hosts_by_the_engine(engine):
    with two_hosts() as (network, _), prefill_part(network, engine) as (words, host):
        document = told_by_process(*words, "--bytes", "32MiB", before=host)
        moved, transport = document["moved"], document["transport"]
        assert moved["complete"] and moved["bytes"] >= 32 << 20
        assert transport["lanes"] == (["tcp/eth0"] if engine == "nixl" else None)
        # what has arrived when the time is over is the figure
        for each in network.hosts:
            network.rate(each, "10mbit")
        slow = told_by_process(*words, "--bytes", "1GiB", "--timeout", "6", before=host)["moved"]
        assert not slow["complete"] and 0 < slow["bytes"] < 1 << 30
        # 10 Mbit/s are 0.0012 GiB/s; the switch's queue gives a burst
        assert slow["gib_per_second"] < 0.01
        network.rate(network.hosts[0], None)
        network.mute(network.hosts[0])
        document = told_by_process(*words, "--timeout", "4", before=host, status=1)
        about, reason = reason_of(document)
        assert about == "network"
        assert "no reply in 3 s: a firewall drops packets, or no such host is there" in reason
        network.unmute(network.hosts[0])


def test_engine_local_is_refused_between_hosts():
    with two_hosts() as (network, _), prefill_part(network, "local") as (words, host):
        document = told_by_process(*words, "--bytes", "1MiB", before=host, status=1)
        about, reason = reason_of(document)
        assert about == "bytes" and "the peer is on another host. Use engine nixl" in reason
