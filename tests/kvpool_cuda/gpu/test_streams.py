"""Work runs on the current stream, waits for events, and never blocks the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpool.device import get_device
from kvpool.device.cpu import CompletedEvent
from tests.pools import PACKED

GPU = torch.device("cuda:0")
A_WHILE = 200_000_000  # cycles


@pytest.fixture
def nothing_waits():
    """A switch that makes every synchronisation that torch detects an error."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


@pytest.event.parametrize("name", ["mha bf16", "mla fp8", "dsv4 fp8"])
def test_no_call_waits_for_the_gpu(name, nothing_waits):
    pool = PACKED[name](device="cuda:0")
    region = next(r for r in pool.layout.regions if r.layer == 1 and not r.role.endswith(".scale"))
    where = torch.tensor([9, 5], device=GPU)
    shape = pool.view(region.role, 1).shape[2:]
    values = {region.role: torch.randn(2, *shape, device=GPU, dtype=torch.bfloat16)}
    space = pool.layout.space_of(region).id_list
    ids = torch.tensor([1, 2], device=GPU)
    at = np.array([pool._base, pool._base + 512])

    def work():
        pool.write(1, where, values)
        pool.read_roles((region.role, region.role), 1, where)
        pool.copy_items(space, ids, ids.flip(0))
        pool.device.copy_runs(at, at + 1024, np.array([160, 96]))
        pool.device.wait(pool.device.record())

    work()  # compiles
    torch.cuda.synchronize()
    nothing_waits(True)
    torch.cuda._sleep(A_WHILE)
    event = pool.device.record()
    work()
    assert not event.query()
    nothing_waits(False)
    event.synchronize()
    assert event.query()


def test_a_stream_that_waits_for_an_event_sees_earlier_writes():
    pool, device = PACKED["mha bf16"](device="cuda:0"), get_device("cuda:0")
    where, writer, reader = torch.tensor([7], device=GPU), torch.cuda.Stream(), torch.cuda.Stream()
    values = torch.randn(1, 4, 8, device=GPU).bfloat16()
    torch.cuda.synchronize()
    for number in range(3):
        given = values * (number + 1)
        writer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(writer):
            torch.cuda._sleep(A_WHILE // 4)
            pool.write(2, where, {"k": given})
            event = device.record()
        with torch.cuda.stream(reader):
            device.wait(event)
            found = pool.read("k", 2, where)
        reader.synchronize()
        assert torch.equal(found, given)


def test_the_host_waits_for_an_event_of_the_host():
    get_device("cuda:0").wait(CompletedEvent())
