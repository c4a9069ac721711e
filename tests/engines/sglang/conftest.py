"""SGLang's engines, for the fixtures of all serving engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.sglang.engines import Engine


@pytest.fixture(scope="session")
def engine() -> type[Engine]:
    return Engine


@pytest.fixture(scope="session")
def answer() -> Callable[..., dict[str, Any]]:
    return lambda single, model, prompt: single.generate([prompt], logprobs=True)[0]
