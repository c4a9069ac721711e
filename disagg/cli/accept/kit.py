"""The conformance kit: most of it in a process of its own, so that a device that crashes ends only
that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row
from disagg.cli.accept.scope import Scope
from kvpool.device import get_device
from kvpool.process import OtherProcess, ProcessFailed
from kvpool.testing.run import (
    HARDWARE_CHECKS,
    HardwareChecks,
    cases,
    device_checks,
    plugin_device_checks,
    pool_checks,
)

CHECK_TIMEOUT = 600.0
"""Seconds until a check is ended."""
QUICK_POOL = "mla fp8"


def conformance_rows(scope: Scope) -> list[Row]:
    """A row for the device, one for each pool, and one for each check that did not pass."""
    rows: dict[str, list[Row]] = {}
    pools = [QUICK_POOL] if scope.quick else ["*"]
    with OtherProcess(Kit, scope.device.name, pools, name="the kit") as kit:
        try:
            names = kit.call("names")
            for number, (subject, check) in enumerate(names):
                scope.tell(f"{number} of {len(names)}: {subject}, {check}")
                row = kit.call("tried", number, timeout=CHECK_TIMEOUT)
                rows.setdefault(subject, []).append(row)
        except ProcessFailed as error:
            rows["kit"] = [Row("kit", FAILED, str(error))]
    return [row for subject, checks in rows.items() for row in _of_subject(subject, checks)]


def _of_subject(subject: str, checks: list[Row]) -> list[Row]:
    passed = [row.seconds for row in checks if row.state == PASSED]
    others = [row for row in checks if row.state != PASSED]
    summary = Row(subject, PASSED, f"{len(passed):,} checks", sum(passed))
    return [summary, *others] if passed else others


class Kit:
    """Called by the other process: every check of a device and of pools on it, but for those that
    have sections of their own.
    """

    def __init__(self, name: str, pools: list[str]) -> None:
        device = get_device(name)
        hardware = [check for group in HARDWARE_CHECKS for check in group.checks]
        alone = [check for check in device_checks(device) if check not in hardware]
        of_device, of_pools = [*alone, *plugin_device_checks(device)], pool_checks(device)
        self._scope = Scope(device, quick=False)
        self._checks: list[tuple[str, Callable[[Any], None], Any]] = [
            *((f"device {name}", check, device) for check in of_device),
            *(
                (f"pool {case.pool}", check, case)
                for case in cases(device, pools)
                for check in of_pools
            ),
        ]

    def names(self) -> list[tuple[str, str]]:
        """What each check is of, and its name."""
        return [(subject, check.__name__) for subject, check, _ in self._checks]

    def tried(self, number: int) -> Row:
        """Runs a check."""
        subject, check, argument = self._checks[number]
        return self._scope.tried(f"{subject}, {check.__name__}", partial(_passes, check, argument))


def hardware_rows(group: HardwareChecks, scope: Scope) -> list[Row]:
    """A row for each check of what only some devices have."""
    if (reason := group.unfit(scope.device)) is not None:
        return [Row(group.name, NOT_HERE, reason)]
    return [
        scope.tried(check.__name__.replace("_", " "), partial(_passes, check, scope.device))
        for check in group.checks
    ]


def _passes(check: Callable[[Any], None], argument: Any) -> str:
    check(argument)
    return " ".join((check.__doc__ or "").split())
