"""Checks of a device's `store_rows` and `load_rows` without a pool: views of every dtype, size and
stride, and every format.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from kvpool.device import Device
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.testing.case import equal, fail, random_of
from kvpool.testing.groups import SCALE_FORMATS
from kvpool.testing.memory import ids_on, off, on, random_slab, same_slab
from kvpool.testing.values import (
    LARGEST_CODE,
    decode,
    dequantise,
    encode,
    odd_floats,
    plain_floats,
    quantise,
)

VIEW_DTYPES = (
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "float32",
    "float64",
)
ENTRIES = 5


def entries_of_any_dtype_are_stored_and_loaded(device: Device) -> None:
    """Rows of odd lengths in views with gaps, `[item, entry, head, dim]`, both NHD and HND."""
    for dtype in VIEW_DTYPES:
        for heads_first in (False, True):
            for width in (1, 7, 32):
                _entries(device, dtype, heads_first, width)


def many_entries_are_stored_and_loaded(device: Device) -> None:
    """Many rows in one call, of a size that is not a power of two."""
    random, items, count = random_of(), 250, 1111
    raw, slab = random_slab(device, random, items * ENTRIES * 48)
    view = slab.view(torch.bfloat16).view(items, ENTRIES, 24)
    places = random.permutation(items * ENTRIES)[:count]
    values = random.integers(0, 256, (count, 48), dtype=np.uint8)
    locations = ids_on(slab.device, places)
    device.store_rows([WriteRow(view, on(slab.device, values, "bfloat16"))], locations)
    raw.reshape(-1, 48)[places] = values
    same_slab(device, slab, raw, "store_rows of 1,111 entries")
    (loaded,) = device.load_rows([ReadRow(view)], locations)
    if not np.array_equal(off(device, loaded), values):
        fail("load_rows of 1,111 entries: the bytes differ from the memory.")


def rows_of_all_kinds_are_loaded_in_one_call(device: Device) -> None:
    """Stored bytes in rows adjacent and apart, and floats of values with scales."""
    random, items = random_of(), 9
    raw, slab = random_slab(device, random, items * ENTRIES * 4096)
    rows = raw.reshape(items * ENTRIES, 4096)
    codes, scales = quantise(plain_floats(random, (len(rows), 128), "float32"), 4, "float32")
    rows[:, 1024:1152], rows[:, 1152:1168] = codes, scales
    slab.copy_(torch.from_numpy(raw))

    def view(dtype: str, first: int, count: int) -> torch.Tensor:
        typed = slab.view(getattr(torch, dtype)).view(items, ENTRIES, -1)
        return typed[..., first // ITEMSIZE[dtype] :][..., :count]

    asked = [
        ReadRow(view("bfloat16", 0, 256)),
        ReadRow(view("float8_e4m3fn", 1024, 128), view("float32", 1152, 4), torch.float16),
        ReadRow(view("uint8", 1031, 7)),
        ReadRow(view("float8_e4m3fn", 1024, 128), view("float32", 1152, 4), torch.float32),
        ReadRow(view("bfloat16", 0, 2048)),
    ]
    for count in (0, 1, 31):
        places = random.permutation(len(rows))[:count]
        stored = rows[places]
        float16, float32 = (
            dequantise(codes[places], scales[places], "float32", dtype)
            for dtype in ("float16", "float32")
        )
        expected = [
            stored[:, :512],
            float16,
            stored[:, 1031:1038],
            float32,
            stored,
        ]
        loaded = device.load_rows(asked, ids_on(slab.device, places))
        equal("load_rows: tensors", len(loaded), len(asked))
        for number, (tensor, wanted) in enumerate(zip(loaded, expected)):
            if not np.array_equal(off(device, tensor), wanted):
                fail(f"load_rows of {count} entries: other values for row {number} than are there.")
    same_slab(device, slab, raw, "load_rows")


def floats_are_quantised_into_every_format(device: Device) -> None:
    """e4m3 and int8 with scales of every dtype, one or four a token; hard roundings too."""
    random, items, width = random_of(), 7, 64
    for code_dtype, scale, count in product(LARGEST_CODE, SCALE_FORMATS, (1, 4)):
        row = width + 4 * ITEMSIZE[scale]
        raw, slab = random_slab(device, random, items * ENTRIES * row)
        rows = raw.reshape(items * ENTRIES, row)
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
            actual = off(device, slab).reshape(rows.shape)
            for first, last, kind in ((0, width, code_dtype), (width, end, scale)):
                stored, expected = actual[:, first:last], rows[:, first:last]
                nan = np.isnan(decode(stored, kind)) & np.isnan(decode(expected, kind))
                np.copyto(stored, expected, where=np.repeat(nan, ITEMSIZE[kind], axis=-1))
            wrong = np.argwhere(actual != rows)
            if wrong.size:
                entry, byte = wrong[0]
                fail(
                    f"store_rows of {dtype} as {code_dtype} with {count} of {scale}: "
                    f"entry {entry}, byte {byte} is {actual[entry, byte]:#04x}, expected "
                    f"{rows[entry, byte]:#04x}."
                )


ROW_CHECKS = (
    entries_of_any_dtype_are_stored_and_loaded,
    many_entries_are_stored_and_loaded,
    rows_of_all_kinds_are_loaded_in_one_call,
    floats_are_quantised_into_every_format,
)


def _entries(device: Device, dtype: str, heads_first: bool, width: int) -> None:
    """A view of 6 items with a gap after each item and before the first."""
    random, items, heads = random_of(dtype, heads_first, width), 6, 3
    size = ITEMSIZE[dtype]
    inner = heads * ENTRIES * width
    stride = inner + 16  # elements
    raw, slab = random_slab(device, random, (16 + items * stride) * size)
    steps = (heads * width, width) if not heads_first else (width, ENTRIES * width)
    strides = [stride, *steps, 1]
    sizes = [items, ENTRIES, heads, width]
    typed = slab.view(getattr(torch, dtype))
    view = typed.as_strided(sizes, strides, typed.storage_offset() + 16)
    rows: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        raw[16 * size :],
        [*sizes[:3], width * size],
        [*(step * size for step in strides[:3]), 1],
    )
    what = f"{dtype} rows of {width}, {'heads' if heads_first else 'entries'} first"
    places = random.permutation(items * ENTRIES)[:17]
    item, entry = np.divmod(places, ENTRIES)
    locations = ids_on(slab.device, places)
    (loaded,) = device.load_rows([ReadRow(view)], locations)
    equal(f"load_rows of {what}: dtype", loaded.dtype, view.dtype)
    if not np.array_equal(off(device, loaded), rows[item, entry]):
        fail(f"load_rows of {what}: the bytes differ from the memory.")
    values = random.integers(0, 256, (places.size, heads, width * size), dtype=np.uint8)
    device.store_rows([WriteRow(view, on(slab.device, values, dtype))], locations)
    rows[item, entry] = values
    same_slab(device, slab, raw, f"store_rows of {what}")
