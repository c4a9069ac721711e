"""Checks of a device that queues work: it runs on the current stream, waits for events, and never
makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvpool.device import Device
from kvpool.testing.case import fail
from kvpool.testing.pools import POOLS

LONG_SIDE, LONG_ROUNDS = 4096, 60
"""Products of square float32 matrices, which take an accelerator many milliseconds."""
STREAM_POOLS = ("mha bf16", "mla fp8", "dsv4 fp8")


def no_streams(device: Device) -> str | None:
    """Why these checks are not for a device, or None."""
    on_host = device.allocate(1).device.type == "cpu"
    return "not for this device: its calls end before they return." if on_host else None


def no_call_waits_for_the_device(device: Device) -> None:
    """Writes, reads, copies and waits return while earlier work runs."""
    memory = device.allocate(1).device
    with torch.get_device_module(memory).device(memory):
        occupy = long_work(device)
        for pool in STREAM_POOLS:
            calls_return_at_once(device, pool, occupy)


def a_stream_that_waits_for_an_event_sees_earlier_writes(device: Device) -> None:
    """3 of 3 writes behind long work are seen by a stream that waits for their event."""
    memory = device.allocate(1).device
    streams = torch.get_device_module(memory)
    with streams.device(memory):  # new streams are of the current device
        reads_see_writes(device, streams, long_work(device))


STREAM_CHECKS = (
    no_call_waits_for_the_device,
    a_stream_that_waits_for_an_event_sees_earlier_writes,
)


def long_work(device: Device) -> Callable[[], object]:
    """Queues work that takes a while. The first call is made here: it loads libraries."""
    side = torch.zeros(LONG_SIDE, LONG_SIDE, device=device.allocate(1).device)
    product = torch.empty_like(side)

    def work() -> None:
        for _ in range(LONG_ROUNDS):
            torch.mm(side, side, out=product)

    torch.mm(side, side, out=product)
    device.record().synchronize()
    return work


def calls_return_at_once(device: Device, name: str, occupy: Callable[[], object]) -> None:
    """Fails if a call on a pool of the kit returns only after the work that `occupy` queues."""
    pool = POOLS[name](device=device.name)
    layout = pool.layout
    region = next(r for r in layout.regions if r.layer == 1 and not r.role.endswith(".scale"))
    view = pool.view(region.role, 1)
    locations = torch.tensor([9, 5], device=view.device)
    values = torch.randn(2, *view.shape[2:], device=view.device, dtype=torch.bfloat16)
    if region.dtype not in ("bfloat16", "float8_e4m3fn"):
        values = values.to(view.dtype)
    id_list = layout.space_of(region).id_list
    ids, swapped = (torch.tensor(pair, device=view.device) for pair in ([1, 2], [2, 1]))
    buffer = layout.buffer_of(region)
    low, high = buffer.base + buffer.item_stride, buffer.base + 2 * buffer.item_stride
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: pool.write(1, locations, {region.role: values}),
        "read": lambda: pool.read_roles((region.role,), 1, locations),
        "copy_items": lambda: pool.copy_items(id_list, ids, swapped),
        "copy_runs": lambda: device.copy_runs(np.array([low]), np.array([high]), np.array([64])),
        "wait": lambda: device.wait(device.record()),
    }
    for call in calls.values():  # compiles
        call()
    device.record().synchronize()
    for what, call in calls.items():
        occupy()
        event = device.record()
        if event.query():
            fail("the work that was to keep the device busy had ended at once.")
        call()
        waited = event.query()
        event.synchronize()
        if waited:
            fail(f"pool {name}: {what} returned only after the work that was queued before it.")


def reads_see_writes(device: Device, streams: Any, occupy: Callable[[], object]) -> None:
    """Writes on one stream, reads on another that waits for the write's event."""
    pool = POOLS["mha bf16"](device=device.name)
    memory = pool.view("k", 2)
    location = torch.tensor([7], device=memory.device)
    values = torch.randn(1, *memory.shape[2:], device=memory.device).bfloat16()
    writer, reader = streams.Stream(), streams.Stream()
    device.record().synchronize()
    for number in range(3):
        written = values * (number + 1)
        device.record().synchronize()
        with streams.stream(writer):
            occupy()
            pool.write(2, location, {"k": written})
            event = device.record()
        with streams.stream(reader):
            device.wait(event)
            read = pool.read("k", 2, location)
            device.record().synchronize()
        if not torch.equal(read.cpu(), written.cpu()):
            fail(f"write {number + 1} of 3: the other stream read what was there before.")
