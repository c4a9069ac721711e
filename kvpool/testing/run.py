"""Runs checks: all of a device, or those of one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any, TypeVar

from kvpool.device import Device, get_device
from kvpool.pools.base import KVPool
from kvpool.pools.placement import Shard
from kvpool.testing import description, devices, entries, items, packing, rows
from kvpool.testing.case import Build, Case, ConformanceError, Finding, Inapplicable
from kvpool.testing.pools import POOLS

PoolCheck = Callable[[Case], None]
DeviceCheck = Callable[[Device], None]
OTHERS: Sequence[Mapping[str, Any]] = ({}, {"placement": "page"}, {"shard": Shard(1, 2)})
_WITHOUT_MEMORY = (
    description.views_described_back_are_the_layout,
    description.contiguous_lists_agree_with_the_layout,
    description.layers_are_the_models,
)
_T = TypeVar("_T")


def check_device(name: str, pools: Sequence[str] = ("*",)) -> list[str]:
    """Runs every check on the device `name` (`cuda:0`), and on the kit's pools there, or only those
    of these names (`mla *` too).

    Returns what was left out, and why, a line each. Raises ConformanceError at the first check that
    fails, and DeviceUnavailable.
    """
    device = get_device(name)
    left_out = _run_all(device_checks(device), device, name, "")
    for case in cases(device, pools):
        left_out += _run_all(pool_checks(device), case, name, case.pool)
    return left_out + _run_all(joined_device_checks(device), device, name, "")


def check_pool(
    build: Build, device: str = "cpu", *, others: Sequence[Mapping[str, Any]] = OTHERS
) -> list[str]:
    """Runs every check of a pool on that of `build(device=device)`: a pool class of your own.

    `build(**more)` makes a small one (a few pages, window pages and slots: all its memory is
    compared after each check), with `more` over its own arguments. `others` are arguments of pools
    with which it must be able to exchange state. Returns and raises as `check_device`.
    """
    case = Case(get_device(device), _name(build), build, others)
    return _run_all(pool_checks(case.device), case, device, case.pool)


def cases(device: Device, pools: Sequence[str] = ("*",)) -> list[Case]:
    """The kit's pools on a device, of these names or patterns."""
    for pattern in pools:
        if not matching(POOLS, pattern):
            raise ValueError(f"pool {pattern!r}: none is so called. There are {', '.join(POOLS)}.")
    named = {n: pool for n, pool in POOLS.items() if any(fnmatchcase(n, each) for each in pools)}
    return [Case(device, name, example, example.others) for name, example in named.items()]


def device_checks(device: Device) -> list[DeviceCheck]:
    """Checks of a device by itself."""
    with_memory = *devices.WITH_MEMORY, *rows.CHECKS
    return [*devices.CHECKS, *(with_memory if has_memory(device) else ())]


def joined_device_checks(device: Device) -> list[DeviceCheck]:
    """Those that other packages offer: `DEVICE_CHECKS` of the modules that entry points of the
    group `kvpool.testing` name.
    """
    return [*_joined("DEVICE_CHECKS")] if has_memory(device) else []


def pool_checks(device: Device) -> list[PoolCheck]:
    """Checks of a pool on a device: the kit's, and `POOL_CHECKS` of the modules that entry points
    of the group `kvpool.testing` name.
    """
    if not has_memory(device):
        return [*_WITHOUT_MEMORY]
    own = (*description.CHECKS, *entries.CHECKS, *packing.CHECKS, *items.CHECKS)
    return [*own, *_joined("POOL_CHECKS")]


def has_memory(device: Device) -> bool:
    """Whether there is anything to write to."""
    return not device.allocate(1).is_meta


def run(check: Callable[[_T], None], subject: _T, device: str, pool: str) -> None:
    """Runs one check; whatever it raises becomes a ConformanceError that says where, or goes on as
    Inapplicable.
    """
    try:
        check(subject)
    except Inapplicable:
        raise
    except Finding as finding:
        raise ConformanceError(device, pool, check.__name__, str(finding)) from None
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        raise ConformanceError(device, pool, check.__name__, sentence) from error


def _run_all(
    checks: Sequence[Callable[[_T], None]], subject: _T, device: str, pool: str
) -> list[str]:
    left_out = []
    for check in checks:
        try:
            run(check, subject, device, pool)
        except Inapplicable as why:
            left_out.append(f"{pool or device}, {check.__name__}: {why}")
    return left_out


def _joined(name: str) -> Iterator[Any]:
    for entry in sorted(entry_points(group="kvpool.testing"), key=lambda entry: entry.name):
        yield from getattr(entry.load(), name, ())


def _name(build: Build) -> str:
    if isinstance(build, type) and issubclass(build, KVPool):
        return build.__name__
    return getattr(build, "__name__", type(build).__name__)
