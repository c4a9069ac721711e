"""Fixtures of the tests that run real engines. Models are made once, single engines asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.pair import LENGTHS
from tests.engines.process import ending
from tests.engines.vllm.engines import Engine, prompts
from tests.engines.vllm.models import save

Tokens = list[list[int]]


@pytest.fixture(scope="session")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokens]:
    """Tokens of one engine that prefills and decodes, for the prompts of `LENGTHS`. With
    linear attention the last token of each is computed in a step of its own, as by a decode engine:
    it rounds otherwise over one step than over two.
    """
    known: dict[Any, Tokens] = {}
    logs = tmp_path_factory.mktemp("single")

    def ask(model: str, **arguments: Any) -> Tokens:
        key = model, *sorted(arguments.items())
        if key not in known:
            with Engine("single", save(model, models), logs, **arguments).ready() as engine:
                # one after the other: `split` holds for all that is being prefilled
                split = model == "qwen3_next"
                alone = [engine.generate([each], split=split)[0] for each in prompts(*LENGTHS)]
            known[key] = [one["tokens"][0] for one in alone]
        return known[key]

    return ask


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine, which ends with the test: `start(role, model, **arguments)`."""

    def one(role: Any, model: str, **arguments: Any) -> Engine:
        return Engine(role, save(model, models), tmp_path / "logs", **arguments)

    yield from ending(one)
