"""Checks of a pool's reads and writes of stored values, by role, layer and flat location."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvpool.layout.grid import Ints
from kvpool.testing.case import Case, equal, fail, raises
from kvpool.testing.groups import Trial, shape
from kvpool.testing.memory import ids_on, off
from kvpool.testing.values import encode


def scatter_writes_these_bytes_and_no_others(case: Case) -> None:
    """Every role, all roles of a layer in one call."""
    trial = Trial(case)
    for group in trial.groups:
        trial.scatter(group, group.pick(trial.random))
    trial.check()


def gather_reads_these_bytes(case: Case) -> None:
    """Every role; results do not share memory with the pool."""
    trial = Trial(case)
    for group in trial.groups:
        locations = group.pick(trial.random)
        for region in group.regions:
            values = trial.pool.gather(region.role, group.layer, locations)
            equal(f"{region}: dtype", values.dtype, getattr(torch, region.dtype))
            equal(f"{region}: device", values.device, trial.device)
            trial.same(region, values, trial.bytes[trial.cells(group, region, locations)])
            values.zero_()
    trial.check()


def locations_may_be_any_integers(case: Case) -> None:
    """Lists, numpy and torch, 32 and 64 bits, host and device, strided."""
    trial = Trial(case)
    for group in {group.space.name: group for group in trial.groups}.values():
        region = group.regions[0]
        for name, form in _FORMS.items():
            locations = group.pick(trial.random)
            raw = trial.stored(region, locations.size)
            trial.bytes[trial.cells(group, region, locations)] = raw
            passed = form(locations, trial.device)
            values = {region.role: trial.on_device(raw, region.dtype)}
            trial.pool.scatter(group.layer, passed, values)
            read = trial.pool.gather(region.role, group.layer, passed)
            trial.same(region, read, raw, f" (locations as {name})")
    trial.check()


def no_locations_are_no_write(case: Case) -> None:
    """An empty list of locations writes and reads nothing."""
    trial = Trial(case)
    pool = trial.pool
    for group in trial.groups:
        values: dict[str, torch.Tensor] = {}
        for region, scales in group.inputs():
            raw = np.zeros(shape(region, 0), dtype=np.uint8)
            dtype = region.dtype if scales is None else "float32"
            raw = raw if scales is None else encode(np.zeros(raw.shape, "f4"), dtype)
            values[region.role] = trial.on_device(raw, dtype)
        pool.write(group.layer, [], values)
        for role in values:
            for read in (pool.read(role, group.layer, []), pool.gather(role, group.layer, [])):
                equal(f"layer {group.layer} {role}: entries read", read.shape[0], 0)
    trial.check()


def a_repeated_location_holds_one_of_its_values(case: Case) -> None:
    """Padding: many rows go to one location, among others that are written once. Each byte may be
    from any of them.
    """
    trial = Trial(case)
    free = np.zeros(trial.bytes.shape, dtype=bool)
    for group in trial.groups:
        once = group.pick(trial.random)
        locations = np.concatenate([once[once != 0], np.zeros(5, dtype=np.int64)])
        locations = trial.random.permutation(locations)
        values = trial.scatter(group, locations)
        for region in group.regions:
            free[trial.cells(group, region, locations[locations == 0])] = True
            read = off(case.device, trial.pool.gather(region.role, group.layer, [0]))
            written = off(case.device, values[region.role])[locations == 0]
            if not (written == read).any(axis=0).all():
                fail(f"{region}: location 0 has bytes of none of its 5 values.")
    trial.memory.check(trial.bytes, free)


def invalid_writes_are_refused_and_change_nothing(case: Case) -> None:
    """Locations out of range, and values of another shape or dtype."""
    trial = Trial(case)
    for group in trial.groups:
        region = group.regions[0]
        raw = np.zeros(shape(region, 2), dtype=np.uint8)
        right, of_bytes = (trial.on_device(raw, dtype) for dtype in (region.dtype, "uint8"))
        end, call = group.locations, partial(trial.pool.scatter, group.layer)
        for kind, what, locations, values in (
            (IndexError, "location -1", [0, -1], right),
            (IndexError, f"location {end} of {end}", [0, end], right),
            (ValueError, "2 values for 1 location", [0], right),
            (ValueError, "values of dtype uint8", [0, 1], of_bytes),
        ):
            raises(kind, f"{region}: {what}", partial(call, locations, {region.role: values}))
    trial.check()


ACCESS_CHECKS = (
    scatter_writes_these_bytes_and_no_others,
    gather_reads_these_bytes,
    locations_may_be_any_integers,
    no_locations_are_no_write,
    a_repeated_location_holds_one_of_its_values,
    invalid_writes_are_refused_and_change_nothing,
)


_FORMS: dict[str, Callable[[Ints, torch.device], Any]] = {
    "list": lambda ids, _: ids.tolist(),
    "numpy int64": lambda ids, _: ids,
    "numpy int32": lambda ids, _: ids.astype(np.int32),
    "torch int64 on the host": lambda ids, _: ids_on(torch.device("cpu"), ids),
    "torch int64": lambda ids, device: ids_on(device, ids),
    "torch int32": lambda ids, device: ids_on(device, ids).int(),
    "strided torch int64": lambda ids, device: ids_on(device, np.repeat(ids, 2))[::2],
}
