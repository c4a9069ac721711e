"""What a forked child has of its parent's endpoints: closed objects, which harm no one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.disagg.engines.peers import ENGINES

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
    ran = subprocess.run(
        [sys.executable, "-c", PARENT, engine], capture_output=True, text=True, timeout=200
    )
    assert (ran.returncode, ran.stdout.split()[-1:]) == (0, ["well"]), ran.stdout + ran.stderr
