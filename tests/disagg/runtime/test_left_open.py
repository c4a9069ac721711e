"""Endpoints that are never closed: their process ends as it would without them, and one that is
dropped ends by itself. A forked child has closed objects in their place, which harm nobody.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress

import pytest

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.protocol.codec import decode as decoded
from disagg.protocol.messages import Disconnect
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import pool, prefill_process, settle
from tests.processes import python, until

LEAVES = """
import sys, threading
from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from kvpool import MLAPool, RequestAddress, Span

engine, threaded, way = sys.argv[1], sys.argv[2] == "threaded", sys.argv[3]
there, here = (
    MLAPool(layers=range(8), kv_lora_rank=512, qk_rope_head_dim=64, num_pages=320, page_size=64,
            dtype="bf16")
    for _ in range(2)
)
prefill = PrefillEndpoint(there.layout, create_engine(engine), threaded=threaded)
decode = DecodeEndpoint(here.layout, create_engine(engine), threaded=threaded)
link = decode.connect([prefill.address])
while not link.settled:
    if not threaded:
        prefill.step()
        decode.step()
for room in range(3):  # whose reads are in flight
    table = RequestAddress(6000, {"kv": Span(range(1 + 100 * room, 95 + 100 * room))})
    decode.receive(room, table)
    prefill.send(room, table)
decode.receive("waits", RequestAddress(10, {"kv": Span([310])}))
if threaded:
    threading.Thread(target=decode.wait, args=("waits",), daemon=True).start()
else:
    prefill.step()
    decode.step()
if way == "exit":
    sys.exit(3)
if way == "raise":
    raise KeyError("its own")
"""


@pytest.mark.parametrize(
    ("engine", "threads", "way", "status"),
    [
        ("local", "threaded", "end", 0),
        *((engine, "threaded", "exit", 3) for engine in ENGINES),
        ("local", "stepped", "raise", 1),
    ],
)
def test_a_process_ends_with_its_own_status_while_rooms_are_read(engine, threads, way, status):
    ran = subprocess.run(
        [sys.executable, "-c", LEAVES, engine, threads, way],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == status, ran.stderr
    assert ("its own" in ran.stderr) == (way == "raise"), ran.stderr


STUCK = """
import sys, time
from disagg import DecodeEndpoint, create_engine
from kvpool import MLAPool, RequestAddress, Span

here = MLAPool(layers=range(2), kv_lora_rank=16, qk_rope_head_dim=8, num_pages=12, page_size=16,
               dtype="f32")
decode = DecodeEndpoint(here.layout, create_engine(sys.argv[1]), peer_timeout=60)
decode.connect([sys.argv[2]], timeout=30)
print("connected", flush=True)
sys.stdin.readline()
decode.receive("r", RequestAddress(75, {"kv": Span(range(1, 6))}))
time.sleep(0.1)
print(time.monotonic(), flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_peer_does_not_hold_the_exit_up(engine):
    with prefill_process(engine=engine) as one:
        one.ask("r")
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK, engine, one.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "connected\n"
        os.kill(one.process.pid, signal.SIGSTOP)
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            left = float(process.stdout.readline())
            assert process.wait(60) == 3
            assert time.monotonic() - left < 10
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
            process.stdin.close()
            process.stdout.close()


def resources():
    """Open files of this process, by what they are, and how many threads it has. What earlier tests
    have left may end meanwhile.
    """
    files = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            files[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    return files, threading.active_count()


def at_most(before):
    files, threads = resources()
    return files <= before[0] and threads <= before[1]


@pytest.mark.parametrize(
    ("engine", "threaded"), [("local", False), *((engine, True) for engine in ENGINES)]
)
def test_an_endpoint_that_is_dropped_warns_and_ends(engine, threaded):
    pools = [pool(), pool()]
    PrefillEndpoint(pools[0].layout, create_engine(engine)).close()  # what a process opens once
    before = resources()
    prefill = PrefillEndpoint(pools[0].layout, create_engine(engine), threaded=threaded)
    decode = DecodeEndpoint(pools[1].layout, create_engine(engine), threaded=threaded)
    link = decode.connect([prefill.address])
    settle(link, *([] if threaded else [prefill, decode]))
    del link
    with pytest.warns(ResourceWarning, match="was dropped without close") as warned:
        del prefill, decode
        until(lambda: gc.collect() is not None and at_most(before))
    names = [str(each.message).split()[1] for each in warned]
    assert {"PrefillEndpoint", "DecodeEndpoint"} <= {*names}, names


def test_an_endpoint_in_a_cycle_is_collected_too():
    one = pool()
    PrefillEndpoint(one.layout, create_engine("local")).close()
    before = resources()
    endpoint = PrefillEndpoint(one.layout, create_engine("local"))
    endpoint.mine = [endpoint]
    with pytest.warns(ResourceWarning, match="PrefillEndpoint was dropped"):
        del endpoint
        until(lambda: gc.collect() is not None and at_most(before))


@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "stepped"])
def test_an_endpoint_that_is_dropped_leaves_the_transport_of_its_caller_alone(threaded):
    network, pools = MemoryNetwork(), [pool(), pool()]
    transport = MemoryTransport(network)
    options = {"threaded": False}
    with PrefillEndpoint(
        pools[0].layout, create_engine("local"), "p", transport=MemoryTransport(network), **options
    ) as prefill:
        threads = threading.active_count()
        decode = DecodeEndpoint(
            pools[1].layout, create_engine("local"), transport=transport, threaded=threaded
        )
        link = decode.connect([prefill.address])
        settle(link, *([prefill] if threaded else [prefill, decode]))
        sent = []
        transport.send = lambda peer, data: sent.append(data)
        with pytest.warns(ResourceWarning):
            del decode
            until(lambda: gc.collect() is not None and threading.active_count() == threads)
        assert transport.connections and not any(
            isinstance(decoded(each), Disconnect) for each in sent
        )


def test_an_endpoint_that_was_never_made_warns_of_nothing(recwarn):
    one = pool()
    with pytest.raises(ValueError, match="bind"):
        PrefillEndpoint(one.layout, create_engine("local"), "nonsense://")
    with pytest.raises(ValueError, match="peer_timeout"):
        DecodeEndpoint(one.layout, create_engine("local"), peer_timeout=-1)
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning]


@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "stepped"])
@pytest.mark.parametrize("kind", [PrefillEndpoint, DecodeEndpoint])
def test_a_closed_endpoint_is_freed_without_the_collector(kind, threaded):
    """What its rooms were given may hold a pool: gigabytes of a device."""
    one = pool()
    endpoint = kind(one.layout, create_engine("local"), threaded=threaded)
    machine = weakref.ref(endpoint.machine)
    gc.collect()
    gc.disable()
    try:
        endpoint.close()
        del endpoint
        assert machine() is None
    finally:
        gc.enable()


PARENT = """
import os, sys, time
from disagg import DecodeEndpoint, EndpointClosed, KVPoll, PrefillEndpoint, create_engine
from kvpool import MLAPool
from tests import oracle

TOKENS = 500
there, here = (
    MLAPool(layers=range(8), kv_lora_rank=512, qk_rope_head_dim=64, num_pages=20, page_size=64,
            dtype="bf16")
    for _ in range(2)
)
source, dest = oracle.place(there, TOKENS, 1), oracle.place(here, TOKENS, 2)
oracle.fill(there, source)


def move(room):
    oracle.blank(here)
    decode.receive(room, dest)
    prefill.send(room, source)
    assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)
    oracle.assert_holds(here, dest)


def in_child(link):
    calls = (
        lambda: prefill.poll("before"),
        lambda: prefill.wait("before"),
        lambda: prefill.failure("before"),
        lambda: prefill.abort("before", "child"),
        lambda: prefill.forget("before"),
        lambda: prefill.send("child", source),
        lambda: prefill.refusals(),
        lambda: prefill.leases(),
        lambda: prefill.snapshot(),
        lambda: prefill.step(),
        lambda: decode.poll("before"),
        lambda: decode.wait("before"),
        lambda: decode.reading("before"),
        lambda: decode.aux("before"),
        lambda: decode.metrics("before"),
        lambda: decode.receive("child", dest),
        lambda: decode.connect([prefill.address], timeout=1),
        lambda: decode.disconnect(link),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except EndpointClosed as error:
            assert "another process" in str(error), error
        else:
            raise SystemExit(f"call {number} raised nothing")
    sys.exit(7)  # leaves the with block: the child's close() is one of nothing


with (
    PrefillEndpoint(there.layout, create_engine(sys.argv[1])) as prefill,
    DecodeEndpoint(here.layout, create_engine(sys.argv[1])) as decode,
):
    link = decode.connect([prefill.address], timeout=60)
    move("before")
    decode.receive("open", dest)
    prefill.send("open", source)  # its reads are in flight in the endpoints' threads
    child = os.fork()
    if child == 0:
        in_child(link)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        raise SystemExit("the child does not end")
    assert os.waitstatus_to_exitcode(status) == 7, status
    assert decode.wait("open", 60) is KVPoll.Success, decode.failure("open")
    move("after")
print("well", flush=True)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_has_closed_endpoints_and_the_parent_goes_on(engine):
    assert python("-c", PARENT, engine, limit=200).split()[-1:] == ["well"]
