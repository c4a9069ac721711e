"""Checks of a device's `store_rows` and `load_rows` without a pool: views of every dtype, size and
stride, and every format.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from kvpool.device import Device
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.testing.case import equal, random_of
from kvpool.testing.memory import DeviceMemory, ids_on, nans_alike, off, on, same
from kvpool.testing.trial import SCALE_FORMATS
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


def entries_of_any_dtype_are_stored_and_loaded(device: Device) -> None:
    """Rows of odd lengths in views with gaps, `[item, entry, head, dim]`, both NHD and HND."""
    for dtype, heads_first, width in product(VIEW_DTYPES, (False, True), (1, 7, 32)):
        _entries(device, dtype, heads_first, width)


def many_entries_are_stored_and_loaded(device: Device) -> None:
    """Many rows in one call, of a size that is not a power of two."""
    random, items, count = random_of(), 250, 1111
    memory = DeviceMemory.filled(device, random, items * ENTRIES * 48)
    view = memory.tensors[0].view(torch.bfloat16).view(items, ENTRIES, 24)
    rows, places = memory.bytes.reshape(-1, 48), random.permutation(items * ENTRIES)[:count]
    values = random.integers(0, 256, (count, 48), dtype=np.uint8)
    locations = ids_on(view.device, places)
    device.store_rows([WriteRow(view, on(view.device, values, "bfloat16"))], locations)
    rows[places] = values
    memory.check("store_rows of 1,111 entries")
    (loaded,) = device.load_rows([ReadRow(view)], locations)
    same("load_rows of 1,111 entries", off(device, loaded), values)


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


def _entries(device: Device, dtype: str, heads_first: bool, width: int) -> None:
    """A view of 6 items with a gap after each item and before the first."""
    random, items, heads = random_of(dtype, heads_first, width), 6, 3
    size = ITEMSIZE[dtype]
    stride = heads * ENTRIES * width + 16  # elements
    memory = DeviceMemory.filled(device, random, (16 + items * stride) * size)
    typed = memory.tensors[0].view(getattr(torch, dtype))
    steps = (width, ENTRIES * width) if heads_first else (heads * width, width)
    strides = [stride, *steps, 1]
    sizes = [items, ENTRIES, heads, width]
    view = typed.as_strided(sizes, strides, typed.storage_offset() + 16)
    rows: Bytes = np.lib.stride_tricks.as_strided(
        memory.bytes[16 * size :],
        [*sizes[:3], width * size],
        [*(step * size for step in strides[:3]), 1],
    )
    what = f"{dtype} rows of {width}, {'heads' if heads_first else 'entries'} first"
    places = random.permutation(items * ENTRIES)[:17]
    item, entry = np.divmod(places, ENTRIES)
    locations = ids_on(view.device, places)
    (loaded,) = device.load_rows([ReadRow(view)], locations)
    equal(f"load_rows of {what}: dtype", loaded.dtype, view.dtype)
    same(f"load_rows of {what}", off(device, loaded), rows[item, entry])
    values = random.integers(0, 256, (places.size, heads, width * size), dtype=np.uint8)
    device.store_rows([WriteRow(view, on(view.device, values, dtype))], locations)
    rows[item, entry] = values
    memory.check(f"store_rows of {what}")
