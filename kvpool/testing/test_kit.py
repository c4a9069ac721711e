"""The kit under pytest: a test for each device check, and for each pool and pool check."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.device import Device, get_device
from kvpool.testing.case import Case, Inapplicable
from kvpool.testing.plugin import device_name, pool_names
from kvpool.testing.run import (
    DeviceCheck,
    PoolCheck,
    cases,
    device_checks,
    plugin_device_checks,
    pool_checks,
    run,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The checks of the device given by `--device`."""
    device = get_device(device_name(metafunc.config))
    if "case" in metafunc.fixturenames:
        pools = cases(device, pool_names(metafunc.config))
        metafunc.parametrize("case", pools, ids=[case.pool for case in pools])
        _parametrize(metafunc, pool_checks(device))
    else:
        metafunc.parametrize("device", [device], ids=[device.name])
        _parametrize(metafunc, [*device_checks(device), *plugin_device_checks(device)])


def _parametrize(metafunc: pytest.Metafunc, checks: Sequence[DeviceCheck | PoolCheck]) -> None:
    metafunc.parametrize("check", checks, ids=[check.__name__ for check in checks])


def test_device(device: Device, check: DeviceCheck) -> None:
    """A check of the device alone."""
    try:
        run(check, device, device.name, "")
    except Inapplicable as why:
        pytest.skip(str(why))


def test_pool(case: Case, check: PoolCheck) -> None:
    """A check of a pool on the device."""
    try:
        run(check, case, case.device.name, case.pool)
    except Inapplicable as why:
        pytest.skip(str(why))
