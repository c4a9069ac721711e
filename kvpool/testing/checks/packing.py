"""Checks of packings: the bytes of written floats, and the floats of stored bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvpool.layout import Region
from kvpool.layout.dtypes import ITEMSIZE, PACKINGS
from kvpool.layout.formats import scale_role
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal
from kvpool.testing.groups import Trial, blocks, shape
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


def write_packs_as_the_formats_say(case: Case) -> None:
    """Floats of every dtype: quantised where the pool has scales, else unchanged."""
    for dtype in FLOATS:
        _write(case, dtype, plain_floats)


def write_packs_extremes(case: Case) -> None:
    """Where the pool has scales: ties, zeros of both signs, tiny and huge numbers, infinities and
    NaNs.
    """
    for dtype in ("float32", "bfloat16"):
        _write(case, dtype, odd_floats)


def read_unpacks_as_the_formats_say(case: Case) -> None:
    """Floats from bytes set by the check: each role alone, and all of a layer in one call."""
    trial = Trial(case)
    pool = trial.pool
    for group in trial.groups:  # one by one: those of a block pool lie over one another
        expected: list[tuple[Region, Bytes, str]] = []
        locations = group.pick(trial.random)
        for region, scales in group.inputs():
            cells = trial.cells(group, region, locations)
            if scales is not None:
                size = shape(region, locations.size)
                numbers = plain_floats(trial.random, size, "float32")
                codes, factors = quantise(numbers, blocks(scales), scales.dtype, region.dtype)
                trial.bytes[cells] = codes
                trial.bytes[trial.cells(group, scales, locations)] = factors
                floats = dequantise(codes, factors, scales.dtype, pool.dtype, region.dtype)
                expected.append((region, floats, pool.dtype))
            elif scale_role(region.role) not in group.by_role:
                expected.append((region, trial.bytes[cells], region.dtype))
        trial.memory.put(trial.bytes)
        roles = [region.role for region, _, _ in expected]
        alone = [pool.read(role, group.layer, locations) for role in roles]
        for read in (alone, pool.read_roles(roles, group.layer, locations)):
            for (region, floats, dtype), tensor in zip(expected, read, strict=True):
                equal(f"{region}: dtype", tensor.dtype, getattr(torch, dtype))
                trial.same(region, tensor, floats)
    trial.check()


def values_may_have_any_strides(case: Case) -> None:
    """Slices of wider tensors, elements that are not adjacent, one row expanded to all."""
    for name, lay in _LAYS.items():
        _write(case, "bfloat16", plain_floats, name, lay)


PACKING_CHECKS = (
    write_packs_as_the_formats_say,
    write_packs_extremes,
    read_unpacks_as_the_formats_say,
    values_may_have_any_strides,
)


def _write(
    case: Case,
    dtype: str,
    floats: Callable[..., Floats],
    how: str = "",
    lay: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> None:
    """Writes floats of `dtype`, or stored values if the pool takes no such floats, laid out by
    `lay`.
    """
    trial = Trial(case, dtype, how)
    for group in trial.groups:
        locations, values = group.pick(trial.random), {}
        for region, scales in group.inputs():
            size, stored = shape(region, locations.size), region.dtype
            converts = scales is not None or _converts(trial.pool, dtype, region)
            passed = dtype if converts else stored
            if passed == stored:
                raw = trial.stored(region, locations.size)
            else:
                size = (*size[:-1], size[-1] // ITEMSIZE[stored])
                numbers = (plain_floats if scales is None else floats)(trial.random, size, passed)
                raw = encode(numbers, passed)
            if how == "one row for all":
                raw = np.broadcast_to(raw[:1], raw.shape)
            values[region.role] = lay(trial.on_device(raw, passed))
            cells = trial.cells(group, region, locations)
            if scales is not None:
                trial.bytes[cells], factors = quantise(
                    decode(raw, passed), blocks(scales), scales.dtype, stored
                )
                trial.bytes[trial.cells(group, scales, locations)] = factors
            else:
                same = passed == stored
                trial.bytes[cells] = raw if same else encode(decode(raw, passed), stored)
        trial.pool.write(group.layer, locations, values)
    trial.check()


def _converts(pool: KVPool, dtype: str, region: Region) -> bool:
    """Whether a write converts `dtype` to the stored dtype: it widens, and rounds only in a pool
    that quantises.
    """
    if region.dtype not in FLOATS or dtype == region.dtype:
        return False
    return region.dtype == "float32" or pool.packing in PACKINGS


def _spaced(values: torch.Tensor) -> torch.Tensor:
    """The same values with no two elements adjacent."""
    wide = values.unsqueeze(-1)
    return torch.cat([wide, wide], dim=-1)[..., 0]


def _sliced(values: torch.Tensor) -> torch.Tensor:
    """The same values, as the second half of rows twice as long."""
    return torch.cat([values, values], dim=-1)[..., values.shape[-1] :]


_LAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sliced": _sliced,
    "spaced": _spaced,
    "locations last": lambda values: values.movedim(0, -1).contiguous().movedim(-1, 0),
    "one row for all": lambda values: values[:1].expand(values.shape),
}
