"""Checks of packings: the bytes of written floats, and the floats of stored bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvpool.layout import Region
from kvpool.layout.dtypes import ITEMSIZE, PACKINGS
from kvpool.layout.formats import scale_role
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal, random_of
from kvpool.testing.groups import blocks, device_of, groups, same, shape
from kvpool.testing.memory import PoolMemory, on
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
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    held = memory.fill(random)
    for group in groups(pool):  # one by one: those of a block pool lie over one another
        meant: list[tuple[Region, Bytes, str]] = []
        where = group.pick(random)
        for region, scales in group.inputs():
            at = memory.cells(region, *group.split(where))
            if scales is None:
                if not _has_scales(pool, region):
                    meant.append((region, held[at], region.dtype))
                continue
            numbers = plain_floats(random, shape(region, where.size), "float32")
            kinds = scales.dtype, region.dtype
            raw, factors = quantise(numbers, blocks(scales), *kinds)
            held[at] = raw
            held[memory.cells(scales, *group.split(where))] = factors
            floats = dequantise(raw, factors, kinds[0], pool.dtype, kinds[1])
            meant.append((region, floats, pool.dtype))
        memory.put(held)
        roles = [region.role for region, _, _ in meant]
        alone = [pool.read(role, group.layer, where) for role in roles]
        for found in (alone, pool.read_roles(roles, group.layer, where)):
            for (region, expected, dtype), tensor in zip(meant, found, strict=True):
                equal(f"{region}: dtype", tensor.dtype, getattr(torch, dtype))
                same(case, region, tensor, expected)
    memory.check(held)


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
    pool, random = case.make(), random_of(case.pool, dtype, how)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    for group in groups(pool):
        where, values = group.pick(random), {}
        for region, scales in group.inputs():
            size, stored = shape(region, where.size), region.dtype
            given = dtype if scales is not None or _converts(pool, dtype, region) else stored
            if given == stored:
                raw = random.integers(0, 256, size, dtype=np.uint8)
            else:
                size = (*size[:-1], size[-1] // ITEMSIZE[stored])
                numbers = (plain_floats if scales is None else floats)(random, size, given)
                raw = encode(numbers, given)
            if how == "one row for all":
                raw = np.broadcast_to(raw[:1], raw.shape)
            values[region.role] = lay(on(device_of(pool), raw, given))
            cells = memory.cells(region, *group.split(where))
            if scales is not None:
                expected[cells], factors = quantise(
                    decode(raw, given), blocks(scales), scales.dtype, stored
                )
                expected[memory.cells(scales, *group.split(where))] = factors
            else:
                expected[cells] = raw if given == stored else encode(decode(raw, given), stored)
        pool.write(group.layer, where, values)
    memory.check(expected)


def _converts(pool: KVPool, dtype: str, region: Region) -> bool:
    """Whether a write converts `dtype` to the stored dtype: it widens, and rounds only in a pool
    that quantises.
    """
    if region.dtype not in FLOATS or dtype == region.dtype:
        return False
    return region.dtype == "float32" or pool.packing in PACKINGS


def _has_scales(pool: KVPool, region: Region) -> bool:
    return (region.owner, region.layer, scale_role(region.role)) in pool.layout.region_by_key


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
