"""A pool under test with all its bytes, and groups of regions that one call can write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from kvpool.layout import Region, Space
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.formats import scale_role
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal, fail, random_of
from kvpool.testing.memory import PoolMemory, off, on
from kvpool.testing.values import LARGEST_CODE, Bytes

SCALE_FORMATS = ("float32", "float16", "float8_e8m0fnu")
MAX_LOCATIONS = 23
"""How many locations a check writes in one call."""


class Trial:
    """A pool of a case, filled at random: `bytes` is what its memory must hold."""

    def __init__(self, case: Case, *seed: object) -> None:
        self.case, self.pool = case, case.make()
        self.random, self.memory = random_of(case.pool, *seed), PoolMemory(self.pool)
        self.bytes = self.memory.fill(self.random)
        self.device = self.pool.item_bytes_view(self.pool.layout.buffers[0]).device
        self.groups = groups(self.pool)

    def stored(self, region: Region, count: int) -> Bytes:
        """Random bytes of `count` entries."""
        return self.random.integers(0, 256, shape(region, count), dtype=np.uint8)

    def on_device(self, raw: Bytes, dtype: str) -> torch.Tensor:
        """Bytes as a tensor on the pool's device."""
        return on(self.device, raw, dtype)

    def scatter(self, group: RegionGroup, locations: Ints) -> dict[str, torch.Tensor]:
        """Writes random bytes to all regions of a group in one call; returns the values by role."""
        values = {}
        for region in group.regions:
            raw = self.stored(region, locations.size)
            self.bytes[self.cells(group, region, locations)] = raw
            values[region.role] = self.on_device(raw, region.dtype)
        self.pool.scatter(group.layer, locations, values)
        return values

    def cells(self, group: RegionGroup, region: Region, locations: Ints) -> Ints:
        """Indices in `bytes` of a region at flat locations."""
        return self.memory.cells(region, *np.divmod(locations, group.space.steps))

    def same(self, region: Region, read: torch.Tensor, expected: Bytes, how: str = "") -> None:
        """Fails the check unless a tensor that was read has these bytes."""
        raw = off(self.case.device, read)
        equal(f"{region}{how}: bytes", raw.shape, expected.shape)
        wrong = np.argwhere(raw != expected)
        if wrong.size:
            first = tuple(wrong[0])
            fail(
                f"{region}{how}: {int(raw[first]):#04x} read, {int(expected[first]):#04x} "
                f"expected, of value {first[0]}, byte {first[-1]} ({len(wrong):,} bytes of "
                f"{raw.size:,} differ)."
            )

    def check(self) -> None:
        """Fails unless the pool's memory holds `bytes`."""
        self.memory.check(self.bytes)


class RegionGroup(NamedTuple):
    """Regions of one layer in one space, by role, and how many locations they have."""

    layer: int
    space: Space
    by_role: Mapping[str, Region]
    locations: int

    @property
    def regions(self) -> list[Region]:
        """All of them."""
        return [*self.by_role.values()]

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
        roles_of_scales = {region.role for region in packed.values()}
        for role, region in self.by_role.items():
            if role not in roles_of_scales:
                yield region, packed.get(role)


def groups(pool: KVPool) -> list[RegionGroup]:
    """Groups with every region of a pool once."""
    regions: dict[tuple[int, str], list[Region]] = {}
    for region in pool.layout.regions:
        key = region.layer, pool.layout.space_of(region).name
        regions.setdefault(key, []).append(region)
    return [
        RegionGroup(
            layer,
            space := pool.layout.space_by_name[name],
            {region.role: region for region in alike},
            space.steps * min(pool.layout.buffer_of(region).items for region in alike),
        )
        for (layer, name), alike in regions.items()
    ]


def shape(region: Region, count: int) -> tuple[int, ...]:
    """`[N, axes..., byte]` of `count` entries."""
    return count, *(a.size for a in region.inner_axes), region.width


def blocks(scales: Region) -> int:
    """How many scales a cell has."""
    return scales.width // ITEMSIZE[scales.dtype]
