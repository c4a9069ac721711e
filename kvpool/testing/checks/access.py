"""Checks of a pool's reads and writes: stored values, and floats as its packing stores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvpool.device import DeviceUnavailable
from kvpool.device.conversion import convert_rows
from kvpool.device.rows_at import RowsAt, ScaledRowsAt, rows_at
from kvpool.layout import Region
from kvpool.layout.dtypes import ITEMSIZE, PACKINGS
from kvpool.layout.formats import scale_role
from kvpool.layout.grid import Ints
from kvpool.testing.case import Inapplicable, equal, fail, raises
from kvpool.testing.memory import RegionGroup, Trial, blocks, ids_on, off, same, shape
from kvpool.testing.values import (
    Bytes,
    Floats,
    decode,
    dequantise,
    encode,
    odd_floats,
    plain_floats,
    quantise,
)

FLOATS = ("float32", "bfloat16", "float16")


def scatter_writes_these_bytes_and_no_others(trial: Trial) -> None:
    """Every role, all roles of a layer in one call."""
    for group in trial.groups:
        trial.scatter(group, group.pick(trial.random))


def gather_reads_these_bytes(trial: Trial) -> None:
    """Every role; results do not share memory with the pool."""
    for group in trial.groups:
        locations = group.pick(trial.random)
        for role, region in group.by_role.items():
            values = trial.pool.gather(role, group.layer, locations)
            equal(f"{region}: dtype", values.dtype, getattr(torch, region.dtype))
            equal(f"{region}: device", values.device, trial.tensors[0].device)
            trial.same(region, values, trial.bytes[trial.cells(region, locations)])
            values.zero_()


def locations_may_be_any_integers(trial: Trial) -> None:
    """Lists, numpy and torch, 32 and 64 bits, host and device, strided."""
    for group in {group.space: group for group in trial.groups}.values():
        role, region = next(iter(group.by_role.items()))
        for name, form in _FORMS.items():
            locations = group.pick(trial.random)
            raw = trial.stored(region, locations.size)
            trial.bytes[trial.cells(region, locations)] = raw
            passed = form(locations, trial.tensors[0].device)
            trial.pool.scatter(group.layer, passed, {role: trial.on_device(raw, region.dtype)})
            read = trial.pool.gather(role, group.layer, passed)
            trial.same(region, read, raw, f" (locations as {name})")


def no_locations_are_no_write(trial: Trial) -> None:
    """An empty list of locations writes and reads nothing."""
    for group in trial.groups:
        values: dict[str, torch.Tensor] = {}
        for region, scales in group.inputs():
            dtype = region.dtype if scales is None else "float32"
            sizes = shape(region, 0)
            count = sizes[-1] // ITEMSIZE[region.dtype] * ITEMSIZE[dtype]
            raw = np.zeros((*sizes[:-1], count), dtype=np.uint8)
            values[region.role] = trial.on_device(raw, dtype)
        trial.pool.write(group.layer, [], values)
        for role in values:
            for read in (trial.pool.read, trial.pool.gather):
                count = read(role, group.layer, []).shape[0]
                equal(f"layer {group.layer} {role}: entries read", count, 0)


def a_repeated_location_holds_one_of_its_values(trial: Trial) -> None:
    """Padding: many rows go to one location, among others that are written once. Each byte may be
    from any of them.
    """
    for group in trial.groups:
        once = group.pick(trial.random)
        locations = np.concatenate([once[once != 0], np.zeros(5, dtype=np.int64)])
        locations = trial.random.permutation(locations)
        values = trial.scatter(group, locations)
        for role, region in group.by_role.items():
            read = off(trial.device, trial.pool.gather(role, group.layer, [0]))
            written = off(trial.device, values[role])[locations == 0]
            if not (written == read).any(axis=0).all():
                fail(f"{region}: location 0 has bytes of none of its 5 values.")
            trial.bytes[trial.cells(region, np.zeros(1, dtype=np.int64))] = read


def invalid_writes_are_refused_and_change_nothing(trial: Trial) -> None:
    """Locations out of range, and values of another shape or dtype."""
    for group in trial.groups:
        role, region = next(iter(group.by_role.items()))
        raw = np.zeros(shape(region, 2), dtype=np.uint8)
        right, of_bytes = (trial.on_device(raw, dtype) for dtype in (region.dtype, "uint8"))
        end, call = group.locations, partial(trial.pool.scatter, group.layer)
        for kind, what, locations, values in (
            (IndexError, "location -1", [0, -1], right),
            (IndexError, f"location {end} of {end}", [0, end], right),
            (ValueError, "2 values for 1 location", [0], right),
            (ValueError, "values of dtype uint8", [0, 1], of_bytes),
        ):
            raises(kind, f"{region}: {what}", partial(call, locations, {role: values}))


def write_packs_as_the_formats_say(trial: Trial) -> None:
    """Floats of every dtype: quantised where the pool has scales, else unchanged."""
    for dtype in FLOATS:
        _write(trial, dtype, plain_floats)


def write_packs_extremes(trial: Trial) -> None:
    """With scales: ties, zeros of both signs, tiny and huge numbers, infinities and NaNs."""
    for dtype in ("float32", "bfloat16"):
        _write(trial, dtype, odd_floats)


def values_may_have_any_strides(trial: Trial) -> None:
    """Slices of wider tensors, elements that are not adjacent, one row expanded to all."""
    for name in _LAYS:
        _write(trial, "bfloat16", plain_floats, name)


def rows_at_pointers_are_stored_as_write_stores(trial: Trial) -> None:
    """Floats of every dtype, as rows of another format arrive in a hand-off."""
    for dtype in FLOATS:
        _write(trial, dtype, plain_floats, store=_store_at_pointers)


def rows_at_pointers_are_read_as_the_formats_say(trial: Trial) -> None:
    """What has scales, as float32."""
    for group in trial.groups:
        locations = group.pick(trial.random)
        for region, scales in group.inputs():
            if scales is None:
                continue
            numbers = plain_floats(trial.random, shape(region, locations.size), "float32")
            codes, factors = quantise(numbers, blocks(scales), scales.dtype, region.dtype)
            trial.bytes[trial.cells(region, locations)] = codes
            trial.bytes[trial.cells(scales, locations)] = factors
            trial.put(trial.bytes)
            floats = dequantise(codes, factors, scales.dtype, "float32", region.dtype)
            read = trial.on_device(np.zeros_like(floats), "float32")
            _convert(trial, _rows_of(trial, region, scales), locations, _rows_in(read), None)
            same(f"{region}: rows at pointers", off(trial.device, read), floats)


def read_unpacks_as_the_formats_say(trial: Trial) -> None:
    """Floats from bytes set by the check: each role alone, and all of a layer in one call."""
    pool = trial.pool
    for group in trial.groups:  # one by one: those of a block pool lie over one another
        expected: list[tuple[Region, Bytes, str]] = []
        locations = group.pick(trial.random)
        for region, scales in group.inputs():
            cells = trial.cells(region, locations)
            if scales is not None:
                numbers = plain_floats(trial.random, shape(region, locations.size), "float32")
                codes, factors = quantise(numbers, blocks(scales), scales.dtype, region.dtype)
                trial.bytes[cells] = codes
                trial.bytes[trial.cells(scales, locations)] = factors
                floats = dequantise(codes, factors, scales.dtype, pool.dtype, region.dtype)
                expected.append((region, floats, pool.dtype))
            elif scale_role(region.role) not in group.by_role:
                expected.append((region, trial.bytes[cells], region.dtype))
        trial.put(trial.bytes)
        roles = [region.role for region, _, _ in expected]
        alone = [pool.read(role, group.layer, locations) for role in roles]
        for read in (alone, pool.read_roles(roles, group.layer, locations)):
            for (region, floats, dtype), tensor in zip(expected, read, strict=True):
                equal(f"{region}: dtype", tensor.dtype, getattr(torch, dtype))
                trial.same(region, tensor, floats)


def _write(
    trial: Trial,
    dtype: str,
    floats: Callable[..., Floats],
    lay: str = "",
    store: Callable[..., None] | None = None,
) -> None:
    """Writes floats of `dtype`, or stored values if the pool takes none such, laid out as named, by
    the pool's `write` or by `store`.
    """
    for group in trial.groups:
        locations, values = group.pick(trial.random), {}
        for region, scales in group.inputs():
            stored = region.dtype
            # a write widens, and rounds only in a pool that quantises
            converts = stored == "float32" or trial.pool.packing in PACKINGS
            passed = dtype if scales or (converts and stored in FLOATS) else stored
            if passed == stored:
                raw = trial.stored(region, locations.size)
            else:
                *dims, width = shape(region, locations.size)
                kind = floats if scales else plain_floats
                raw = encode(kind(trial.random, (*dims, width // ITEMSIZE[stored]), passed), passed)
            if lay == "one row for all":
                raw = np.broadcast_to(raw[:1], raw.shape)
            tensor = trial.on_device(raw, passed)
            values[region.role] = _LAYS[lay](tensor) if lay else tensor
            if scales:
                numbers = decode(raw, passed)
                raw, factors = quantise(numbers, blocks(scales), scales.dtype, stored)
                trial.bytes[trial.cells(scales, locations)] = factors
            elif passed != stored:
                raw = encode(decode(raw, passed), stored)
            trial.bytes[trial.cells(region, locations)] = raw
        if store is None:
            trial.pool.write(group.layer, locations, values)
        else:
            store(trial, group, locations, values)
    trial.check()


def _store_at_pointers(
    trial: Trial, group: RegionGroup, locations: Ints, values: dict[str, torch.Tensor]
) -> None:
    for region, scales in group.inputs():
        rows = values[region.role]
        if scales is None and region.dtype not in FLOATS:
            trial.pool.write(group.layer, locations, {region.role: rows})
        else:
            _convert(trial, _rows_in(rows), None, _rows_of(trial, region, scales), locations)


def _convert(
    trial: Trial, source: ScaledRowsAt, read: Ints | None, dest: ScaledRowsAt, write: Ints | None
) -> None:
    """Of the rows of a tensor (`read` or `write` is None) all."""
    read = np.arange(source.rows.sizes[0]) if read is None else read
    write = np.arange(dest.rows.sizes[0]) if write is None else write
    try:
        convert_rows(trial.device, [(source, dest)], read, write)
    except DeviceUnavailable as refused:
        raise Inapplicable(str(refused)) from None


def _rows_of(trial: Trial, region: Region, scales: Region | None) -> ScaledRowsAt:
    """A region's rows in the pool."""
    rows = rows_at(region, trial.layout.buffer_of(region))
    if scales is None:
        return ScaledRowsAt(rows)
    return ScaledRowsAt(rows, rows_at(scales, trial.layout.buffer_of(scales)))


def _rows_in(tensor: torch.Tensor) -> ScaledRowsAt:
    """The rows `[N, ..., element]` of a tensor."""
    size, (count, *inner) = tensor.element_size(), tensor.shape
    first, *strides = (stride * size for stride in tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = (count, 1, *inner)
    return ScaledRowsAt(RowsAt(dtype, tensor.data_ptr(), sizes, (first, first, *strides)))


_FORMS: dict[str, Callable[[Ints, torch.device], Any]] = {
    "list": lambda ids, _: ids.tolist(),
    "numpy int64": lambda ids, _: ids,
    "numpy int32": lambda ids, _: ids.astype(np.int32),
    "torch int64 on the host": lambda ids, _: ids_on(torch.device("cpu"), ids),
    "torch int64": lambda ids, device: ids_on(device, ids),
    "torch int32": lambda ids, device: ids_on(device, ids).int(),
    "strided torch int64": lambda ids, device: ids_on(device, np.repeat(ids, 2))[::2],
}
# the same values, in other strides
_LAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sliced": lambda values: torch.cat([values, values], dim=-1)[..., values.shape[-1] :],
    "spaced": lambda values: torch.stack([values, values], dim=-1)[..., 0],
    "locations last": lambda values: values.movedim(0, -1).contiguous().movedim(-1, 0),
    "one row for all": lambda values: values[:1].expand(values.shape),
}
