"""Checks of a device without a pool: properties, memory, copies, events, and rows of all views."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import torch

from kvpool.device import Device, DeviceUnavailable, get_device
from kvpool.device.cpu import CompletedEvent
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.testing.case import equal, fail, random_of
from kvpool.testing.checks.layout import chain
from kvpool.testing.memory import SCALE_FORMATS, DeviceMemory, ids_on, nans_alike, off, on, same
from kvpool.testing.values import (
    LARGEST_CODE,
    Bytes,
    dequantise,
    encode,
    odd_floats,
    plain_floats,
    quantise,
)

VIEW_DTYPES = (
    *("uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "float64"),
)
ENTRIES = 5


def its_properties_are_valid(device: Device) -> None:
    """Availability, name, kind of memory, alignment, limit of registrations, emulation."""
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


def entries_of_any_dtype_are_stored_and_loaded(device: Device) -> None:
    """Rows of odd lengths in views with gaps, `[item, entry, head, dim]`, both NHD and HND; and
    many rows, of a size that is not a power of two.
    """
    for dtype, heads_first, width in product(VIEW_DTYPES, (False, True), (1, 7, 32)):
        _entries(device, dtype, heads_first, width)
    _entries(device, "bfloat16", False, 8, items=250, count=1111)


def rows_of_all_kinds_are_loaded_in_one_call(device: Device) -> None:
    """Stored bytes in rows adjacent and apart, and floats of values with scales."""
    random, items = random_of(), 9
    memory = DeviceMemory.filled(device, random, items * ENTRIES * 4096)
    rows = memory.bytes.reshape(items * ENTRIES, 4096)
    codes, scales = quantise(plain_floats(random, (len(rows), 128), "float32"), 4, "float32")
    rows[:, 1024:1152], rows[:, 1152:1168] = codes, scales
    memory.put(memory.bytes)

    def view(dtype: str, first: int, count: int) -> torch.Tensor:
        typed = memory.tensors[0].view(getattr(torch, dtype)).view(items, ENTRIES, -1)
        return typed[..., first // ITEMSIZE[dtype] :][..., :count]

    def quantised(dtype: torch.dtype) -> ReadRow:
        return ReadRow(view("float8_e4m3fn", 1024, 128), view("float32", 1152, 4), dtype)

    asked = [
        ReadRow(view("bfloat16", 0, 256)),
        quantised(torch.float16),
        ReadRow(view("uint8", 1031, 7)),
        quantised(torch.float32),
        ReadRow(view("bfloat16", 0, 2048)),
    ]
    for count in (0, 1, 31):
        places = random.permutation(len(rows))[:count]
        stored = rows[places]
        float16, float32 = (
            dequantise(codes[places], scales[places], "float32", dtype)
            for dtype in ("float16", "float32")
        )
        expected = [stored[:, :512], float16, stored[:, 1031:1038], float32, stored]
        loaded = device.load_rows(asked, ids_on(memory.tensors[0].device, places))
        for number, (tensor, wanted) in enumerate(zip(loaded, expected, strict=True)):
            same(f"load_rows of {count} entries, row {number}", off(device, tensor), wanted)
    memory.check("load_rows")


def floats_are_quantised_into_every_format(device: Device) -> None:
    """e4m3 and int8 with scales of every dtype, one or four a token; hard roundings too."""
    random, items, width = random_of(), 7, 64
    for code_dtype, scale, count in product(LARGEST_CODE, SCALE_FORMATS, (1, 4)):
        row = width + 4 * ITEMSIZE[scale]
        memory = DeviceMemory.filled(device, random, items * ENTRIES * row)
        rows, (slab,) = memory.bytes.reshape(-1, row), memory.tensors
        entries = slab.view(items, ENTRIES, row)
        view = entries[..., :width].view(getattr(torch, code_dtype))
        scales = entries[..., width:].view(getattr(torch, scale))[..., :count]
        for floats, dtype in product((plain_floats, odd_floats), ("float32", "bfloat16")):
            places = random.permutation(len(rows))[:19]
            numbers = floats(random, (places.size, width), dtype)
            values = on(slab.device, encode(numbers, dtype), dtype)
            device.store_rows([WriteRow(view, values, scales)], ids_on(slab.device, places))
            codes, factors = quantise(numbers, count, scale, code_dtype)
            end = width + factors.shape[-1]
            rows[places, :width], rows[places, width:end] = codes, factors
            actual = memory.read().reshape(rows.shape)
            for part, kind in ((slice(width), code_dtype), (slice(width, end), scale)):
                actual[:, part] = nans_alike(actual[:, part], rows[:, part], kind)
            same(f"store_rows of {dtype} as {code_dtype} with {count} of {scale}", actual, rows)


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


def _entries(
    device: Device, dtype: str, heads_first: bool, width: int, *, items: int = 6, count: int = 17
) -> None:
    """A view with a gap after each item and before the first, and `count` entries of it."""
    random, heads = random_of(dtype, heads_first, width), 3
    size = ITEMSIZE[dtype]
    stride = heads * ENTRIES * width + 16  # elements
    memory = DeviceMemory.filled(device, random, (16 + items * stride) * size)
    typed = memory.tensors[0].view(getattr(torch, dtype))
    steps = (width, ENTRIES * width) if heads_first else (heads * width, width)
    strides = [stride, *steps, 1]
    sizes = [items, ENTRIES, heads, width]
    view = typed.as_strided(sizes, strides, typed.storage_offset() + 16)
    rows: Bytes = np.lib.stride_tricks.as_strided(
        memory.bytes[16 * size :], [*sizes[:3], width * size], [*(s * size for s in strides[:3]), 1]
    )
    what = f"{dtype} rows of {width}, {'heads' if heads_first else 'entries'} first"
    places = random.permutation(items * ENTRIES)[:count]
    item, entry = np.divmod(places, ENTRIES)
    locations = ids_on(view.device, places)
    (loaded,) = device.load_rows([ReadRow(view)], locations)
    equal(f"load_rows of {what}: dtype", loaded.dtype, view.dtype)
    same(f"load_rows of {what}", off(device, loaded), rows[item, entry])
    values = random.integers(0, 256, (places.size, heads, width * size), dtype=np.uint8)
    device.store_rows([WriteRow(view, on(view.device, values, dtype))], locations)
    rows[item, entry] = values
    memory.check(f"store_rows of {what}")
