"""Tests between hosts: collected only where they are asked for, since hosts are made by root; those
of real engines only in an environment that has the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.launcher import end_launchers
from tests.engines.pair import EXACT, LENGTHS
from tests.hosts.network import Network

HERE = Path(__file__).parent
ABSENT = [name for name in ("vllm", "sglang") if not find_spec(name)]
collect_ignore = [f"test_{name}.py" for name in ABSENT]
if len(ABSENT) == 2:
    collect_ignore += ["test_engine_runs.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves this folder out of runs that do not name it."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in paths) else True


@pytest.fixture(scope="session", autouse=True)
def launchers() -> Iterator[None]:
    """Processes that fork engines end with the tests."""
    yield
    end_launchers()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Four hosts for engines."""
    with Network(4) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def right(network: Network, engine: Any, answer: Callable[..., Any]) -> list[list[int]]:
    """What a single engine answers to the prompts of `LENGTHS`."""
    from tests.engines.vllm.engines import prompts
    from tests.hosts.sides import sides

    with sides(network, engine) as engines:
        single = engines.single("llama", **EXACT).ready()
        return [answer(single.generate([prompt])[0]) for prompt in prompts(*LENGTHS)]


@pytest.fixture
def start(network: Network, engine: Any) -> Iterator[Callable[..., Any]]:
    """Starts an engine on a host: `Sides.start`."""
    from tests.hosts.sides import sides

    with sides(network, engine) as engines:
        yield engines.start


@pytest.fixture
def watch(network: Network, tmp_path: Path) -> Path:
    """A folder that all hosts see."""
    folder = Path(network.folder, tmp_path.name)
    folder.mkdir()
    return folder
