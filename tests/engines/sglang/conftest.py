"""Fixtures of the tests that run real engines. Models are made once, single engines asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.pair import LENGTHS
from tests.engines.process import ending
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

Answers = list[dict[str, Any]]


@pytest.fixture(scope="session")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answers]:
    """What one engine that prefills and decodes answers to the prompts of `LENGTHS`, one after the
    other.
    """
    known: dict[Any, Answers] = {}
    logs = tmp_path_factory.mktemp("single")

    def ask(model: str, **arguments: Any) -> Answers:
        key = model, *sorted(arguments.items())
        if key not in known:
            with Engine("single", save(model, models), logs, **arguments).ready() as engine:
                known[key] = [
                    engine.generate([each], logprobs=True)[0] for each in prompts(*LENGTHS)
                ]
        return known[key]

    return ask


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine, which ends with the test: `start(role, model, **arguments)`."""

    def one(role: Any, model: str, **arguments: Any) -> Engine:
        return Engine(role, save(model, models), tmp_path / "logs", **arguments)

    yield from ending(one)
