"""Engines of both kinds, which end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.pair import EXACT
from tests.engines.process import ending
from tests.engines.vllm.models import save


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine: `start(engine, role, model, **arguments)`."""

    def one(engine: Any, role: str, model: str, **arguments: Any) -> Any:
        logs = tmp_path / "logs"
        return engine(role, save(model, models), logs, watch=tmp_path, **{**EXACT, **arguments})

    yield from ending(one)
