"""Runs the checks of a device, or of one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import filter as matching, fnmatchcase
from functools import wraps
from importlib.metadata import entry_points
from inspect import isfunction, signature
from types import ModuleType
from typing import Any, NamedTuple

from kvpool.device import Device, get_device
from kvpool.layout.formats import Shard
from kvpool.testing.case import Build, Case, CheckFailure, ConformanceError, Inapplicable
from kvpool.testing.checks import access, devices, layout
from kvpool.testing.checks.hardware import HARDWARE_CHECKS
from kvpool.testing.memory import Trial
from kvpool.testing.pools import POOLS

Check = Callable[[Any], None]
OTHERS: Sequence[Mapping[str, Any]] = ({}, {"placement": "page"}, {"shard": Shard(1, 2)})


class BoundCheck(NamedTuple):
    """A check of a device (`pool` is empty), or of a pool on it."""

    check: Check
    subject: Device | Case
    device: str
    pool: str = ""

    @property
    def name(self) -> str:
        """The check's."""
        return self.check.__name__

    def __call__(self) -> None:
        """Runs it. Anything that it raises but Inapplicable becomes a ConformanceError."""
        try:
            self.check(self.subject)
        except Inapplicable:
            raise
        except CheckFailure as failure:
            raise ConformanceError(self.device, self.pool, self.name, str(failure)) from None
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"
            raise ConformanceError(self.device, self.pool, self.name, sentence) from error


def check_device(name: str, pools: Sequence[str] = ("*",)) -> list[str]:
    """Runs every check of the device `name` (`cuda:0`) and of the kit's pools on it, or only of
    pools with these names or patterns (`mla *`).

    Returns a line for each check that does not apply, with the reason. Raises ConformanceError at
    the first check that fails, and DeviceUnavailable.
    """
    return _run_all(all_checks(get_device(name), pools))


def check_pool(
    build: Build, device: str = "cpu", *, others: Sequence[Mapping[str, Any]] = OTHERS
) -> list[str]:
    """Runs every pool check on pools of your own, made by `build(**more)`.

    `build` makes a small pool (a few pages, window pages and slots, because all its memory is
    compared after each check) in which `more` overrides its arguments. `others` are arguments of
    pools that must exchange state with it. Returns and raises as `check_device`.
    """
    name = getattr(build, "__name__", type(build).__name__)
    return _run_all(pool_checks(Case(get_device(device), name, build, others)))


def all_checks(
    device: Device, pools: Sequence[str] = ("*",), hardware: bool = True
) -> list[BoundCheck]:
    """Every check of a device and of the kit's pools with these names or patterns on it; without
    `hardware`, but for those of what only some devices have. Raises ValueError for other names, and
    for a device without memory.
    """
    for pattern in pools:
        if not matching(POOLS, pattern):
            raise ValueError(f"pool {pattern!r}: no such pool. The kit has {', '.join(POOLS)}.")
    if device.allocate(1).is_meta:
        raise ValueError(f"device {device.name}: it has no memory that could be checked.")
    checks = device_checks(device, hardware)
    for name, example in POOLS.items():
        if any(fnmatchcase(name, pattern) for pattern in pools):
            checks += pool_checks(Case(device, name, example, example.others))
    return checks


def device_checks(device: Device, hardware: bool = True) -> list[BoundCheck]:
    """The kit's checks of a device without a pool."""
    checks = [*_checks_in(devices, "device")]
    for group in HARDWARE_CHECKS:
        if hardware and group.unfit(device) is None:
            checks += group.checks
    return [BoundCheck(check, device, device.name) for check in checks]


def pool_checks(case: Case) -> list[BoundCheck]:
    """The kit's checks of a pool, and `POOL_CHECKS` of the entry points in `kvpool.testing`."""
    checks = [*_checks_in(layout, "case")]
    for part in (layout, access):
        checks += [_with_trial(check) for check in _checks_in(part, "trial")]
    for entry in sorted(entry_points(group="kvpool.testing"), key=lambda entry: entry.name):
        checks += entry.load().POOL_CHECKS
    return [BoundCheck(check, case, case.device.name, case.pool) for check in checks]


def _checks_in(module: ModuleType, subject: str) -> Iterator[Check]:
    """The checks that a module defines: its public functions of a `device`, `case` or `trial`."""
    for name, value in vars(module).items():
        own = isfunction(value) and value.__module__ == module.__name__
        if own and not name.startswith("_") and [*signature(value).parameters] == [subject]:
            yield value


def _with_trial(check: Callable[[Trial], None]) -> Check:
    """A check of a case, after which all memory of its pool is compared."""

    @wraps(check)
    def checked(case: Case) -> None:
        trial = Trial(case)
        check(trial)
        trial.check()

    return checked


def _run_all(checks: Sequence[BoundCheck]) -> list[str]:
    left_out = []
    for check in checks:
        try:
            check()
        except Inapplicable as why:
            left_out.append(f"{check.pool or check.device}, {check.name}: {why}")
    return left_out
