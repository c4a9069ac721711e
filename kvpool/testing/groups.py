"""Groups of regions that one call can write: those of one layer in one space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from kvpool.layout import Region, Space
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.formats import scale_role
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal, fail
from kvpool.testing.memory import off
from kvpool.testing.values import LARGEST_CODE, Bytes

SCALE_FORMATS = ("float32", "float16", "float8_e8m0fnu")
MAX_LOCATIONS = 23
"""How many locations a check writes in one call."""


class Group(NamedTuple):
    """Regions of one layer in one space, and how many locations they have."""

    layer: int
    space: Space
    regions: tuple[Region, ...]
    locations: int

    def split(self, where: Ints) -> tuple[Ints, Ints]:
        """The items and entries of flat locations."""
        return np.divmod(where, self.space.steps)

    def pick(self, random: np.random.Generator) -> Ints:
        """Distinct locations `[N]`."""
        return random.permutation(self.locations)[:MAX_LOCATIONS].astype(np.int64)

    def inputs(self) -> Iterator[tuple[Region, Region | None]]:
        """The regions for which a write takes values, each with the region of its scales if floats
        are quantised. Any other packing takes stored values.
        """
        by_role = {region.role: region for region in self.regions}
        packed = {
            role: by_role[scale_role(role)]
            for role, region in by_role.items()
            if scale_role(role) in by_role
            and region.dtype in LARGEST_CODE
            and by_role[scale_role(role)].dtype in SCALE_FORMATS
        }
        scales = {region.role for region in packed.values()}
        for role, region in by_role.items():
            if role not in scales:
                yield region, packed.get(role)


def groups(pool: KVPool) -> list[Group]:
    """Groups with every region of a pool once."""
    found: dict[tuple[int, str], list[Region]] = {}
    for region in pool.layout.regions:
        key = region.layer, pool.layout.space_of(region).name
        found.setdefault(key, []).append(region)
    made = []
    for (layer, name), regions in found.items():
        space = pool.layout.space_by_name[name]
        items = min(pool.layout.buffer_of(region).items for region in regions)
        made.append(Group(layer, space, tuple(regions), items * space.steps))
    return made


def shape(region: Region, count: int) -> tuple[int, ...]:
    """`[N, axes..., byte]` of `count` entries."""
    return count, *(a.size for a in region.inner_axes), region.width


def blocks(scales: Region) -> int:
    """How many scales a cell has."""
    return scales.width // ITEMSIZE[scales.dtype]


def device_of(pool: KVPool) -> torch.device:
    """The torch device of a pool's tensors."""
    return pool.item_bytes_view(pool.layout.buffers[0]).device


def same(case: Case, region: Region, found: torch.Tensor, expected: Bytes, more: str = "") -> None:
    """Fails the check unless a tensor that was read has these bytes."""
    raw = off(case.device, found)
    equal(f"{region}{more}: bytes", raw.shape, expected.shape)
    wrong = np.argwhere(raw != expected)
    if wrong.size:
        at = tuple(wrong[0])
        fail(
            f"{region}{more}: {int(raw[at]):#04x} read, {int(expected[at]):#04x} expected, of "
            f"value {at[0]}, byte {at[-1]} ({len(wrong):,} bytes of {raw.size:,} differ)."
        )
