"""The kit under pytest: a test for each check."""

from __future__ import annotations

import pytest

from kvpool.device import get_device
from kvpool.testing.case import Inapplicable
from kvpool.testing.plugin import device_name, pool_names
from kvpool.testing.run import BoundCheck, all_checks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The checks of the device given by `--device`."""
    checks = all_checks(get_device(device_name(metafunc.config)), pool_names(metafunc.config))
    names = [f"{check.pool or check.device}-{check.name}" for check in checks]
    metafunc.parametrize("check", checks, ids=names)


def test_conforms(check: BoundCheck) -> None:
    """A device, or a pool on it."""
    try:
        check()
    except Inapplicable as why:
        pytest.skip(str(why))
