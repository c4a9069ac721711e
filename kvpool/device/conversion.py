"""Rows at pointers of a device's memory, stored in another format by the device's operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpool.device import Converting, Device, DeviceUnavailable, Pointing
from kvpool.device.rows_at import RowsAt, ScaledRowsAt
from kvpool.device.torch_ops import ReadRow, WriteRow, slots
from kvpool.layout.grid import Ints

E4M3_MAX = 448.0


def convert_rows(
    device: Device, pairs: Sequence[tuple[ScaledRowsAt, ScaledRowsAt]], read: Ints, write: Ints
) -> None:
    """Reads rows of each pair's first at locations `read` `[N]`, and stores them at `write` `[N]`
    of its second. What has scales is read as float32; what gets none is rounded to the nearest, in
    float8_e4m3fn at most to its largest.
    Raises DeviceUnavailable for memory of a kind whose pointers torch does not take.
    """
    if not read.size:
        return
    if isinstance(device, Converting) and device.convert_rows(pairs, read, write):
        return
    read_locations = _locations(device, read)
    consecutive = int(read[-1] - read[0]) + 1 == read.size and bool((read[1:] > read[:-1]).all())
    rows: list[WriteRow] = []
    for source, dest in pairs:
        view = _tensor(device, dest.rows)
        values = _tensor(device, source.rows)
        if source.scales is not None:
            row = ReadRow(values, _tensor(device, source.scales), torch.float32)
            (values,) = device.load_rows([row], read_locations)
        elif consecutive and (flat := slots(values)) is not None:
            values = flat[int(read[0]) : int(read[-1]) + 1]
        else:
            (values,) = device.load_rows([ReadRow(values)], read_locations)
        if values.dtype == torch.float8_e4m3fn:
            values = values.float()
        if dest.scales is not None:
            rows.append(WriteRow(view, values, _tensor(device, dest.scales)))
        elif view.dtype == torch.float8_e4m3fn:
            rows.append(WriteRow(view, values.float().clamp(-E4M3_MAX, E4M3_MAX).to(view.dtype)))
        else:
            rows.append(WriteRow(view, values.to(view.dtype)))
    device.store_rows(rows, _locations(device, write))


def _locations(device: Device, numbers: Ints) -> torch.Tensor:
    locations = torch.from_numpy(np.ascontiguousarray(numbers))
    return locations if device.memory_kind == "cpu" else locations.to(device.name)


def _tensor(device: Device, rows: RowsAt) -> torch.Tensor:
    kind = getattr(torch, rows.dtype)
    size = kind.itemsize
    if any(stride % size for stride in rows.strides) or rows.base % size:
        raise ValueError(f"rows of {rows.dtype} that do not lie at multiples of {size} bytes.")
    reach = size + sum((n - 1) * stride for n, stride in zip(rows.sizes, rows.strides))
    if not isinstance(device, Pointing):
        raise DeviceUnavailable(
            f"device {device.name} makes no tensor of a pointer (memory_at), so nothing is "
            "converted in its memory: convert on prefill, or give both sides one format."
        )
    flat = device.memory_at(rows.base, reach).view(kind)
    return flat.as_strided(rows.sizes, [stride // size for stride in rows.strides])
