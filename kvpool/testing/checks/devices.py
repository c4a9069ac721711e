"""Checks of a device without a pool: properties, memory, copies, events."""

from __future__ import annotations

import time

import numpy as np
import torch

from kvpool.device import Device, DeviceUnavailable, get_device
from kvpool.device.cpu import CompletedEvent
from kvpool.device.torch_ops import WriteRow
from kvpool.testing.case import equal, fail, random_of
from kvpool.testing.checks.items import chain
from kvpool.testing.memory import DeviceMemory, ids_on, off, on, same
from kvpool.testing.values import Bytes


def its_properties_are_valid(device: Device) -> None:
    """Availability, name, kind of memory, alignment, limit of registrations, whether
    it is emulated.
    """
    equal("availability", device.availability(), None)
    equal("the name of get_device(name)", get_device(device.name).name, device.name)
    if not device.memory_kind.isidentifier():
        fail(f"memory_kind: {device.memory_kind!r} where a name without a number is expected.")
    if device.alignment < 1 or device.alignment & (device.alignment - 1):
        fail(f"alignment: {device.alignment} where a power of two is expected.")
    limit = device.registration_limit
    if limit is not None and limit < 1:
        fail(f"registration_limit: {limit} where None or a number from 1 is expected.")
    equal("the type of emulated", type(device.emulated), bool)


def a_device_that_is_not_there_is_refused_by_name(device: Device) -> None:
    """Number 9999 of this kind raises DeviceUnavailable, unless the device ignores numbers."""
    name = f"{device.name.partition(':')[0]}:9999"
    try:
        memory = get_device(name).allocate(64)
    except DeviceUnavailable as error:
        if name not in str(error):
            fail(f"{name}: DeviceUnavailable does not name the device: {error}")
        return
    except Exception as error:
        fail(f"{name}: {type(error).__name__} ({error}) where DeviceUnavailable is expected.")
    equal(f"bytes of {name}", memory.numel(), 64)


def memory_is_zero_aligned_and_its_own(device: Device) -> None:
    """Odd sizes, alignments up to 2 MiB, and memory that is reused."""
    in_use: list[torch.Tensor] = []
    for nbytes in (1, 63, 4096, 100_003, 3 << 20):
        for alignment in (None, 1, 512, 4096, 2 << 20):
            memory = _allocated(device, nbytes, alignment)
            for block in in_use:
                low, high = block.data_ptr(), block.data_ptr() + block.numel()
                if memory.data_ptr() < high and low < memory.data_ptr() + nbytes:
                    fail(f"allocate({nbytes}): overlaps memory in use at {low:#x}.")
            memory.fill_(0xA5)
            in_use = [*in_use[-3:], memory]
    in_use.clear()
    for nbytes in (63, 4096, 3 << 20):  # memory that was just freed
        _allocated(device, nbytes, None)


def an_event_tells_when_work_has_ended(device: Device) -> None:
    """Copies that depend on one another have all landed when the event has ended."""
    accelerated = _is_accelerator(device)  # where less work would end before the check
    items, width, rounds = 16, (8 << 20 if accelerated else 64 << 10), (8 if accelerated else 1)
    memory = DeviceMemory.filled(device, random_of(), items * width)
    (slab,) = memory.tensors
    steps = [ids_on(slab.device, [number]) for number in range(items)]
    for _ in range(rounds):
        for number in range(items - 1):
            device.copy_items([slab.view(items, width)], steps[number], steps[number + 1])
    memory.bytes = np.tile(memory.bytes[:width], items)
    event = device.record()
    event.synchronize()
    if not np.array_equal(_read_now(slab), memory.bytes):
        time.sleep(1)
        if np.array_equal(_read_now(slab), memory.bytes):
            fail("an event had ended before the work queued ahead of it.")
        memory.check("copy_items, one item after another")
    if not event.query():
        fail("query() of an event is false after synchronize() has returned.")


def items_are_copied_in_all_views(device: Device) -> None:
    """Views of many widths in one call: interleaved, odd, long; and dependent calls."""
    random, items = random_of(), 300 if _is_accelerator(device) else 40
    widths = (3, 37, 64, 1000)
    stride = sum(widths) + 5
    memory = DeviceMemory.filled(device, random, items * stride)
    (slab,) = memory.tensors
    starts = np.cumsum([0, *widths[:-1]]).tolist()
    views = [slab.view(items, stride)[:, a : a + width] for a, width in zip(starts, widths)]
    rows = memory.bytes.reshape(items, stride)
    # a ring of all items; then disjoint halves, with and without saying so
    halves = random.permutation(items).reshape(2, -1)
    for src, dst, disjoint in (
        (*chain(random, np.arange(items)), False),
        (halves[0], halves[1], True),
        (halves[1, ::2], halves[0, ::2], False),
        (halves[0, :1], halves[1, 1:2], True),
        (halves[0, :0], halves[1, :0], True),
    ):
        from_, to = (ids_on(slab.device, ids) for ids in (src, dst))
        device.copy_items(views, from_, to, disjoint=disjoint)
        rows[dst, : sum(widths)] = rows[src, : sum(widths)]
        memory.check(f"copy_items of {src.size} items")
    from_, to = (ids_on(slab.device, ids) for ids in halves)
    device.copy_items([], from_, to)


def runs_are_copied_to_the_byte(device: Device) -> None:
    """Runs of any length at any pointer, of mixed lengths or of one, `nbytes` broadcast."""
    random = random_of()
    longest, many = (1 << 20, 3000) if _is_accelerator(device) else (20_000, 99)
    memory = DeviceMemory.filled(device, random, 6 << 20)
    base, half, raw = memory.tensors[0].data_ptr(), memory.bytes.size // 2, memory.bytes
    lengths = np.concatenate([np.arange(0, 40), random.integers(0, 20_000, 9), [longest]])
    none = np.zeros(0, dtype=np.int64)
    for nbytes in (random.permutation(lengths), np.broadcast_to(np.int64(656), many), none):
        gaps = random.integers(0, 9, nbytes.size)
        src = np.cumsum(nbytes + gaps) - nbytes
        order = random.permutation(nbytes.size)  # packed at the destination, in another order
        dst = np.empty_like(src)
        dst[order] = half + 1 + np.cumsum(nbytes[order]) - nbytes[order]
        for columns in ((src, dst), (dst, src)):
            device.copy_runs(base + columns[0], base + columns[1], nbytes)
            for read, write, count in zip(*columns, nbytes):
                raw[write : write + count] = raw[read : read + count]
        memory.check(f"copy_runs of {nbytes.size} runs")


def work_waits_for_an_event(device: Device) -> None:
    """Of its own event, twice, and of one from a device whose calls finish before they return."""
    random = random_of()
    memory = DeviceMemory.filled(device, random, 4096)
    (slab,) = memory.tensors
    event = device.record()
    for awaited in (event, event, CompletedEvent()):
        device.wait(awaited)
        values = random.integers(0, 256, (3, 64), dtype=np.uint8)
        places = random.permutation(64)[:3]
        rows = [WriteRow(slab.view(8, 8, 64), on(slab.device, values, "uint8"))]
        device.store_rows(rows, ids_on(slab.device, places))
        memory.bytes.reshape(64, 64)[places] = values
    memory.check("store_rows after an event")


def _allocated(device: Device, nbytes: int, alignment: int | None) -> torch.Tensor:
    memory = device.allocate(nbytes, alignment)
    call = f"allocate({nbytes}, {alignment})"
    equal(f"{call}: dtype, shape", (memory.dtype, tuple(memory.shape)), (torch.uint8, (nbytes,)))
    pointer, step = memory.data_ptr(), alignment or device.alignment
    if pointer % step:
        fail(f"{call}: at {pointer:#x}, {pointer % step} bytes past a multiple of {step}.")
    same(f"{call}, zeroed", off(device, memory), np.zeros(nbytes, dtype=np.uint8))
    return memory


def _is_accelerator(device: Device) -> bool:
    """Whether tensors are not in host memory: larger checks are needed, and fast enough."""
    return device.allocate(1).device.type != "cpu"


def _read_now(memory: torch.Tensor) -> Bytes:
    """Bytes, read without waiting for the device: on another stream if there are streams."""
    if memory.device.type == "cpu":
        return np.array(memory.numpy())
    before = torch.accelerator.current_stream(memory.device)
    torch.accelerator.set_stream(torch.Stream(device=memory.device))
    try:
        return np.array(memory.cpu().numpy())
    finally:
        torch.accelerator.set_stream(before)
