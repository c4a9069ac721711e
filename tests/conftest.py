"""Options of the suite: --long, --forbid-skips, --screenshots."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from kvpool import _native
from tests.leftovers import Guard

settings.register_profile(
    "kvpool",
    deadline=None,
    max_examples=60,  # hypothesis makes 100: the whole suite is to take ten minutes
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("long", settings.get_profile("kvpool"), max_examples=500)
settings.load_profile("kvpool")
GUARD = pytest.StashKey[Guard]()
# a shell's background jobs ignore Ctrl-C, and so would every process that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["outside Python", "in Python"])
def copies(request, monkeypatch):
    """Runs and rows are copied by compiled code, and as they are where there was no compiler."""
    if request.param == "in Python":
        monkeypatch.setenv("KVPOOL_NATIVE", "0")
    else:
        assert _native.availability() is None, "kvpool's C code is not compiled"
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too")
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails the run")
    parser.addoption("--screenshots", metavar="DIR", help="keep pictures and screenshots there")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        settings.load_profile("long")
    if not hasattr(config, "workerinput"):  # a worker ends within the run that started it
        config.stash[GUARD] = Guard()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {"long": config.getoption("--long"), "root": os.geteuid() == 0}
    for marker in (name for name, given in wanted.items() if not given):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Fails the run if tests were skipped that must not be, or if processes are left now that all
    workers have ended; kills those.
    """
    yield
    guard = session.config.stash.get(GUARD, None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--forbid-skips") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if guard is not None and (lines := guard.end()):
        reporter.ensure_newline()
        reporter.section("processes that outlived the tests, killed now", red=True)
        for line in lines:
            reporter.write_line(line)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def one_thread():
    """Tensors are tiny: on a busy machine, threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def farm():
    """Prefill's processes."""
    from tests.disagg.runtime.farm import Farm

    processes = Farm()
    yield processes
    processes.end()
