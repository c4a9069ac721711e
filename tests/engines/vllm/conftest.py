"""vLLM's engines, for the fixtures of all serving engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.vllm.engines import Engine


@pytest.fixture(scope="session")
def engine() -> type[Engine]:
    return Engine


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[int]]:
    """The tokens of a prompt. With linear attention its last token is computed in a step of its
    own, as by a decode engine: it rounds otherwise over one step than over two.
    """

    def ask(single: Engine, model: str, prompt: list[int]) -> list[int]:
        # one prompt after the other: `split` holds for all that is being prefilled
        answers = single.generate([prompt], split=model == "qwen3_next")
        tokens: list[int] = answers[0]["tokens"][0]
        return tokens

    return ask
