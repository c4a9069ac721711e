"""Tests inside a serving engine's own environment: collected only where the engine is installed."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.launcher import end_launchers

collect_ignore_glob = []
if not find_spec("vllm"):
    collect_ignore_glob += ["test_*.py", "vllm"]
if not find_spec("sglang"):
    collect_ignore_glob += ["sglang"]
if not find_spec("sglang") or "KVPOOL_VLLM_PYTHON" not in os.environ:  # they need both
    collect_ignore_glob += ["cross"]


@pytest.fixture(scope="session", autouse=True)
def launchers() -> Iterator[None]:
    """Processes that fork engines end with the tests."""
    yield
    end_launchers()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are."""
    return tmp_path_factory.mktemp("models")
