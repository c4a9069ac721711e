"""Work runs on the current stream, waits for events, and never makes the host wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from disagg.cli.accept.report import NOT_HERE, Row
from disagg.cli.accept.scope import Scope, Wrong
from kvpool.device import Device
from kvpool.testing.pools import POOLS

LONG_SIDE, LONG_ROUNDS = 4096, 60
"""Products of square float32 matrices, which take an accelerator many milliseconds."""


def stream_rows(scope: Scope) -> list[Row]:
    """The host does not wait; streams wait for events."""
    if scope.on_host:
        return [Row("streams", NOT_HERE, "not for this device: its calls end before they return.")]
    device, where = scope.device, scope.device.allocate(1).device
    streams = torch.get_device_module(where)
    waits = "a stream that waits for an event sees earlier writes"
    with streams.device(where):  # new streams are of the current device
        occupy = occupied(device)
        rows = [
            scope.tried(
                f"no call waits for the device, {pool}", partial(host_goes_on, device, pool, occupy)
            )
            for pool in ("mha bf16", "mla fp8", "dsv4 fp8")
        ]
        return [*rows, scope.tried(waits, partial(stream_waits, device, streams, occupy))]


def occupied(device: Device) -> Callable[[], object]:
    """Queues work that takes a while. The first call is made here: it loads libraries."""
    side = torch.zeros(LONG_SIDE, LONG_SIDE, device=device.allocate(1).device)

    def work() -> None:
        for _ in range(LONG_ROUNDS):
            torch.mm(side, side, out=product)

    product = torch.empty_like(side)
    torch.mm(side, side, out=product)
    device.record().synchronize()
    return work


def host_goes_on(device: Device, name: str, occupy: Callable[[], object]) -> str:
    """Raises Wrong if a call on a pool of the kit returns only after the work before it."""
    pool = POOLS[name](device=device.name)
    layout = pool.layout
    region = next(r for r in layout.regions if r.layer == 1 and not r.role.endswith(".scale"))
    view = pool.view(region.role, 1)
    where = torch.tensor([9, 5], device=view.device)
    values = torch.randn(2, *view.shape[2:], device=view.device, dtype=torch.bfloat16)
    if region.dtype not in ("bfloat16", "float8_e4m3fn"):
        values = values.to(view.dtype)
    id_list = layout.space_of(region).id_list
    ids, swapped = (torch.tensor(each, device=view.device) for each in ([1, 2], [2, 1]))
    buffer = layout.buffer_of(region)
    low, high = buffer.base + buffer.item_stride, buffer.base + 2 * buffer.item_stride
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: pool.write(1, where, {region.role: values}),
        "read": lambda: pool.read_roles((region.role,), 1, where),
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
            raise Wrong("the work that was to keep the device busy had ended at once.")
        call()
        waited = event.query()
        event.synchronize()
        if waited:
            raise Wrong(f"{what} returned only after the work that was queued before it.")
    return f"{', '.join(calls)} returned while earlier work ran"


def stream_waits(device: Device, streams: Any, occupy: Callable[[], object]) -> str:
    """Writes on one stream, reads on another that waits for the write's event."""
    pool = POOLS["mha bf16"](device=device.name)
    memory = pool.view("k", 2)
    where = torch.tensor([7], device=memory.device)
    values = torch.randn(1, *memory.shape[2:], device=memory.device).bfloat16()
    writer, reader = streams.Stream(), streams.Stream()
    device.record().synchronize()
    for number in range(3):
        given = values * (number + 1)
        device.record().synchronize()
        with streams.stream(writer):
            occupy()
            pool.write(2, where, {"k": given})
            event = device.record()
        with streams.stream(reader):
            device.wait(event)
            found = pool.read("k", 2, where)
            device.record().synchronize()
        if not torch.equal(found.cpu(), given.cpu()):
            raise Wrong(f"write {number + 1} of 3: the other stream read what was there before.")
    return "3 of 3 writes behind long work were seen by a stream that waited for their event"
