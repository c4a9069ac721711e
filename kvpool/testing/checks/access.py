"""Checks of a pool's reads and writes of stored values, by role, layer and flat location."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvpool.layout.grid import Ints
from kvpool.testing.case import Case, equal, fail, raises, random_of
from kvpool.testing.groups import device_of, groups, same, shape
from kvpool.testing.memory import PoolMemory, ids_on, off, on
from kvpool.testing.values import encode


def scatter_writes_these_bytes_and_no_others(case: Case) -> None:
    """Every role, all roles of a layer in one call."""
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    for group in groups(pool):
        where, values = group.pick(random), {}
        for region in group.regions:
            raw = random.integers(0, 256, shape(region, where.size), dtype=np.uint8)
            expected[memory.cells(region, *group.split(where))] = raw
            values[region.role] = on(device_of(pool), raw, region.dtype)
        pool.scatter(group.layer, where, values)
    memory.check(expected)


def gather_reads_these_bytes(case: Case) -> None:
    """Every role; results do not share memory with the pool."""
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    held = memory.fill(random)
    for group in groups(pool):
        where = group.pick(random)
        for region in group.regions:
            found = pool.gather(region.role, group.layer, where)
            equal(f"{region}: dtype", found.dtype, getattr(torch, region.dtype))
            equal(f"{region}: device", found.device, device_of(pool))
            same(case, region, found, held[memory.cells(region, *group.split(where))])
            found.zero_()
    memory.check(held)


def locations_may_be_any_integers(case: Case) -> None:
    """Lists, numpy and torch, 32 and 64 bits, host and device, strided."""
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    for group in {group.space.name: group for group in groups(pool)}.values():
        region = group.regions[0]
        for name, form in _FORMS.items():
            where = group.pick(random)
            raw = random.integers(0, 256, shape(region, where.size), dtype=np.uint8)
            cells = memory.cells(region, *group.split(where))
            expected[cells] = raw
            given = form(where, device_of(pool))
            pool.scatter(group.layer, given, {region.role: on(device_of(pool), raw, region.dtype)})
            found = pool.gather(region.role, group.layer, given)
            same(case, region, found, raw, f" (locations as {name})")
    memory.check(expected)


def no_locations_are_no_write(case: Case) -> None:
    """An empty list of locations writes and reads nothing."""
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    for group in groups(pool):
        values: dict[str, torch.Tensor] = {}
        for region, scales in group.inputs():
            raw = np.zeros(shape(region, 0), dtype=np.uint8)
            dtype = region.dtype if scales is None else "float32"
            raw = raw if scales is None else encode(np.zeros(raw.shape, "f4"), dtype)
            values[region.role] = on(device_of(pool), raw, dtype)
        pool.write(group.layer, [], values)
        for role in values:
            for found in (pool.read(role, group.layer, []), pool.gather(role, group.layer, [])):
                equal(f"layer {group.layer} {role}: entries read", found.shape[0], 0)
    memory.check(expected)


def a_repeated_location_holds_one_of_its_values(case: Case) -> None:
    """Padding: many rows go to one location, among others that are written once. Each byte may be
    from any of them.
    """
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    free = np.zeros(expected.shape, dtype=bool)
    for group in groups(pool):
        once = group.pick(random)
        where = np.concatenate([once[once != 0], np.zeros(5, dtype=np.int64)])
        where = random.permutation(where)
        values = {}
        for region in group.regions:
            raw = random.integers(0, 256, shape(region, where.size), dtype=np.uint8)
            expected[memory.cells(region, *group.split(where))] = raw
            free[memory.cells(region, *group.split(where[where == 0]))] = True
            values[region.role] = on(device_of(pool), raw, region.dtype)
        pool.scatter(group.layer, where, values)
        for region in group.regions:
            found = pool.gather(region.role, group.layer, [0])
            given = off(case.device, values[region.role])[where == 0]
            if not (given == off(case.device, found)).any(axis=0).all():
                fail(f"{region}: location 0 has bytes of none of its 5 values.")
    memory.check(expected, free)


def invalid_writes_are_refused_and_change_nothing(case: Case) -> None:
    """Locations out of range, and values of another shape or dtype."""
    pool, random = case.make(), random_of(case.pool)
    memory = PoolMemory(pool)
    expected = memory.fill(random)
    for group in groups(pool):
        region = group.regions[0]
        raw = np.zeros(shape(region, 2), dtype=np.uint8)
        good = on(device_of(pool), raw, region.dtype)
        other = on(device_of(pool), raw, "uint8")
        end, call = group.locations, partial(pool.scatter, group.layer)
        for kind, what, where, values in (
            (IndexError, "location -1", [0, -1], good),
            (IndexError, f"location {end} of {end}", [0, end], good),
            (ValueError, "2 values for 1 location", [0], good),
            (ValueError, "values of dtype uint8", [0, 1], other),
        ):
            raises(kind, f"{region}: {what}", partial(call, where, {region.role: values}))
    memory.check(expected)


ACCESS_CHECKS = (
    scatter_writes_these_bytes_and_no_others,
    gather_reads_these_bytes,
    locations_may_be_any_integers,
    no_locations_are_no_write,
    a_repeated_location_holds_one_of_its_values,
    invalid_writes_are_refused_and_change_nothing,
)


_FORMS: dict[str, Callable[[Ints, torch.device], Any]] = {
    "list": lambda where, _: where.tolist(),
    "numpy int64": lambda where, _: where,
    "numpy int32": lambda where, _: where.astype(np.int32),
    "torch int64 on the host": lambda where, _: ids_on(torch.device("cpu"), where),
    "torch int64": lambda where, device: ids_on(device, where),
    "torch int32": lambda where, device: ids_on(device, where).int(),
    "strided torch int64": lambda where, device: ids_on(device, np.repeat(where, 2))[::2],
}
