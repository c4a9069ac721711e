"""A pool of a case with all its bytes, and groups of regions that one call can write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from kvpool.layout import Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.formats import scale_role
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, random_of
from kvpool.testing.memory import PoolMemory, off, on, same
from kvpool.testing.values import LARGEST_CODE, Bytes

SCALE_FORMATS = ("float32", "float16", "float8_e8m0fnu")
MAX_LOCATIONS = 23
"""How many locations a check writes in one call."""


class RegionGroup(NamedTuple):
    """Regions of one layer in one space, by role, and how many locations they have."""

    layer: int
    space: str
    by_role: Mapping[str, Region]
    locations: int

    def pick(self, random: np.random.Generator) -> Ints:
        """Distinct locations `[N]`."""
        return random.permutation(self.locations)[:MAX_LOCATIONS].astype(np.int64)

    def inputs(self) -> Iterator[tuple[Region, Region | None]]:
        """The regions for which a write takes values, each with the region of its scales if floats
        are quantised. Any other packing takes stored values.
        """
        packed = {}
        for role, region in self.by_role.items():
            scales = self.by_role.get(scale_role(role))
            if scales and region.dtype in LARGEST_CODE and scales.dtype in SCALE_FORMATS:
                packed[role] = scales
        for role, region in self.by_role.items():
            if region not in packed.values():
                yield region, packed.get(role)


class Trial(PoolMemory):
    """The pool of a case, filled at random."""

    def __init__(self, case: Case, *seed: object) -> None:
        super().__init__(case.make())
        self.random = random_of(case.pool, *seed)
        self.fill(self.random)
        self.groups = groups(self.pool)

    def stored(self, region: Region, count: int) -> Bytes:
        """Random bytes of `count` entries."""
        return self.random.integers(0, 256, shape(region, count), dtype=np.uint8)

    def on_device(self, raw: Bytes, dtype: str) -> torch.Tensor:
        """Bytes as a tensor on the pool's device."""
        return on(self.tensors[0].device, raw, dtype)

    def scatter(self, group: RegionGroup, locations: Ints) -> dict[str, torch.Tensor]:
        """Writes random bytes to all regions of a group in one call; returns the values by role."""
        values = {}
        for role, region in group.by_role.items():
            raw = self.stored(region, locations.size)
            self.bytes[self.cells(region, locations)] = raw
            values[role] = self.on_device(raw, region.dtype)
        self.pool.scatter(group.layer, locations, values)
        return values

    def same(self, region: Region, read: torch.Tensor, expected: Bytes, how: str = "") -> None:
        """Fails the check unless a tensor that was read has these bytes."""
        same(f"{region}{how}: values that were read", off(self.device, read), expected)


def groups(pool: KVPool) -> list[RegionGroup]:
    """Groups with every region of a pool once."""
    regions: dict[tuple[int, str], dict[str, Region]] = {}
    for region in pool.layout.regions:
        key = region.layer, pool.layout.space_of(region).name
        regions.setdefault(key, {})[region.role] = region
    counts = {buffer.name: buffer.items for buffer in pool.layout.buffers}
    return [
        RegionGroup(
            layer,
            space,
            by_role,
            pool.layout.space_by_name[space].steps
            * min(counts[region.buffer] for region in by_role.values()),
        )
        for (layer, space), by_role in regions.items()
    ]


def shape(region: Region, count: int) -> tuple[int, ...]:
    """`[N, axes..., byte]` of `count` entries."""
    return count, *(a.size for a in region.inner_axes), region.width


def blocks(scales: Region) -> int:
    """How many scales a cell has."""
    return scales.width // ITEMSIZE[scales.dtype]
