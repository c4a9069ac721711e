"""pytest's options `--device` and `--pool`, in runs of the kit only.

pytest loads this plugin wherever kvpool is installed. It does nothing unless the kit is among the
arguments, so that other projects can have options of the same names.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

DEVICE, POOLS = "kvpool_device", "kvpool_pools"
_ASKED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Adds the options if the kit is to run, after the project's conftest has added its own."""
    yield
    early_config.stash[_ASKED] = any(map(_is_kit, args))
    if not early_config.stash[_ASKED]:
        return
    group = parser.getgroup("kvpool", "conformance kit of kvpool")
    for option, name, action, words in (
        ("--device", DEVICE, "store", "device to check (default: cpu)"),
        ("--pool", POOLS, "append", "only the pool of this name (or 'mla *'); may be repeated"),
    ):
        if not _has(parser, option):
            group.addoption(option, dest=name, metavar="NAME", action=action, help=words)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuses an unavailable device before anything runs."""
    if config.stash.get(_ASKED, False):
        from kvpool.device import DeviceUnavailable, get_device
        from kvpool.testing.run import all_checks

        try:
            all_checks(get_device(device_name(config)), pool_names(config))
        except (DeviceUnavailable, ValueError) as error:
            raise pytest.UsageError(str(error)) from None


def device_name(config: pytest.Config) -> str:
    """The device to check, from our option or the project's own `--device`."""
    option = config.getoption(DEVICE, default=None) or config.getoption("device", default=None)
    return str(option or "cpu")


def pool_names(config: pytest.Config) -> list[str]:
    """Names or patterns of the pools to check."""
    return config.getoption(POOLS, default=None) or ["*"]


def _has(parser: pytest.Parser, option: str) -> bool:
    """Whether the project has an option of that name."""
    try:
        return bool(parser.parse_known_and_unknown_args([f"{option}=x"])[1] == [])
    except pytest.UsageError:  # it has one that does not take this value
        return True


def _is_kit(argument: str) -> bool:
    """Whether an argument of `--pyargs` names this package or a part of it."""
    return f"{argument.partition('::')[0]}.".startswith(f"{__package__}.")
