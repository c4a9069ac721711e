"""Runs the checks of a device, or of one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import filter as matching, fnmatchcase
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from kvpool.device import Device, get_device
from kvpool.layout.formats import Shard
from kvpool.pools.base import KVPool
from kvpool.testing.case import Build, Case, CheckFailure, ConformanceError, Inapplicable
from kvpool.testing.checks import layout
from kvpool.testing.checks.access import ACCESS_CHECKS
from kvpool.testing.checks.devices import MEMORY_CHECKS, PROPERTY_CHECKS
from kvpool.testing.checks.graphs import GRAPH_CHECKS, no_graphs
from kvpool.testing.checks.items import ITEM_CHECKS
from kvpool.testing.checks.layout import LAYOUT_CHECKS
from kvpool.testing.checks.packing import PACKING_CHECKS
from kvpool.testing.checks.rows import ROW_CHECKS
from kvpool.testing.checks.sharing import SHARING_CHECKS, no_sharing
from kvpool.testing.checks.streams import STREAM_CHECKS, no_streams
from kvpool.testing.pools import POOLS

PoolCheck = Callable[[Case], None]
DeviceCheck = Callable[[Device], None]
OTHERS: Sequence[Mapping[str, Any]] = ({}, {"placement": "page"}, {"shard": Shard(1, 2)})
_WITHOUT_MEMORY = (
    layout.views_described_back_are_the_layout,
    layout.contiguous_lists_agree_with_the_layout,
    layout.layers_are_the_models,
)
_T = TypeVar("_T")


class HardwareChecks(NamedTuple):
    """Checks of what only some devices have: `unfit` says why a device has it not, or None."""

    name: str
    title: str
    unfit: Callable[[Device], str | None]
    checks: Sequence[DeviceCheck]


HARDWARE_CHECKS = (
    HardwareChecks(
        "streams",
        "work on streams is ordered by events and never waits",
        no_streams,
        STREAM_CHECKS,
    ),
    HardwareChecks(
        "graphs",
        "captured writes, reads and copies replay with new inputs",
        no_graphs,
        GRAPH_CHECKS,
    ),
    HardwareChecks("ipc", "another process maps the device's memory", no_sharing, SHARING_CHECKS),
)


def check_device(name: str, pools: Sequence[str] = ("*",)) -> list[str]:
    """Runs every check of the device `name` (`cuda:0`) and of the kit's pools on it, or only of
    pools with these names or patterns (`mla *`).

    Returns a line for each check that does not apply, with the reason. Raises ConformanceError at
    the first check that fails, and DeviceUnavailable.
    """
    device = get_device(name)
    left_out = _run_all(device_checks(device), device, name, "")
    for case in cases(device, pools):
        left_out += _run_all(pool_checks(device), case, name, case.pool)
    return left_out + _run_all(plugin_device_checks(device), device, name, "")


def check_pool(
    build: Build, device: str = "cpu", *, others: Sequence[Mapping[str, Any]] = OTHERS
) -> list[str]:
    """Runs every pool check on pools of your own, made by `build(**more)`.

    `build` makes a small pool (a few pages, window pages and slots, because all its memory is
    compared after each check) in which `more` overrides its arguments. `others` are arguments of
    pools that must exchange state with it. Returns and raises as `check_device`.
    """
    case = Case(get_device(device), _name(build), build, others)
    return _run_all(pool_checks(case.device), case, device, case.pool)


def cases(device: Device, pools: Sequence[str] = ("*",)) -> list[Case]:
    """The kit's pools with these names or patterns, on a device."""
    for pattern in pools:
        if not matching(POOLS, pattern):
            raise ValueError(f"pool {pattern!r}: no such pool. The kit has {', '.join(POOLS)}.")
    named = {
        n: pool for n, pool in POOLS.items() if any(fnmatchcase(n, wanted) for wanted in pools)
    }
    return [Case(device, name, example, example.others) for name, example in named.items()]


def device_checks(device: Device) -> list[DeviceCheck]:
    """Checks of a device without a pool."""
    if not has_memory(device):
        return [*PROPERTY_CHECKS]
    fitting = [group for group in HARDWARE_CHECKS if group.unfit(device) is None]
    hardware = [check for group in fitting for check in group.checks]
    return [*PROPERTY_CHECKS, *MEMORY_CHECKS, *ROW_CHECKS, *hardware]


def plugin_device_checks(device: Device) -> list[DeviceCheck]:
    """`DEVICE_CHECKS` of the modules with an entry point of the group `kvpool.testing`."""
    return [*_plugged_in("DEVICE_CHECKS")] if has_memory(device) else []


def pool_checks(device: Device) -> list[PoolCheck]:
    """The kit's checks of a pool, and `POOL_CHECKS` of the modules with an entry point of the group
    `kvpool.testing`.
    """
    if not has_memory(device):
        return [*_WITHOUT_MEMORY]
    own = (*LAYOUT_CHECKS, *ACCESS_CHECKS, *PACKING_CHECKS, *ITEM_CHECKS)
    return [*own, *_plugged_in("POOL_CHECKS")]


def has_memory(device: Device) -> bool:
    """Whether the device has memory to write to."""
    return not device.allocate(1).is_meta


def run(check: Callable[[_T], None], subject: _T, device: str, pool: str) -> None:
    """Runs one check. Anything it raises but Inapplicable becomes a ConformanceError with the names
    of device, pool and check.
    """
    try:
        check(subject)
    except Inapplicable:
        raise
    except CheckFailure as failure:
        raise ConformanceError(device, pool, check.__name__, str(failure)) from None
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


def _plugged_in(name: str) -> Iterator[Any]:
    for entry in sorted(entry_points(group="kvpool.testing"), key=lambda entry: entry.name):
        yield from getattr(entry.load(), name, ())


def _name(build: Build) -> str:
    if isinstance(build, type) and issubclass(build, KVPool):
        return build.__name__
    return getattr(build, "__name__", type(build).__name__)
