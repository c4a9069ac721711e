"""Engines that see, over one store: what is behind a picture is found behind the same picture, and
behind no other. Tokens are those of one engine that computes all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.pair import EXACT
from tests.engines.vllm import pictures
from tests.engines.vllm.engines import Engine, prompts
from tests.engines.vllm.test_store import Stores, tokens

CHUNK, FIRST, SECOND, LENGTH = 128, 200, 450, 800
"""Of prompts: where two pictures begin, each in two chunks and more."""
CAT, DOG, BIRD = 1, 2, 3
SHOWN = [[CAT, DOG], [DOG, CAT], [CAT, BIRD], [BIRD, DOG], [CAT, CAT]]
BEFORE = [FIRST // CHUNK * CHUNK, SECOND // CHUNK * CHUNK]
"""Tokens of the chunks before each picture."""
WHOLE = (LENGTH - 1) // CHUNK * CHUNK


@pytest.fixture
def stores(start: Any, tmp_path: Path) -> Stores:
    return Stores(start, tmp_path)


def asked() -> list[int]:
    """One token stands for each picture, which vLLM makes as many as it needs."""
    one, two, three = prompts(
        FIRST, SECOND - FIRST - pictures.LENGTH, LENGTH - SECOND - pictures.LENGTH
    )
    return [*one, pictures.TOKEN, *two, pictures.TOKEN, *three]


def see(engine: Engine, shown: list[list[int]], **more: Any) -> tuple[list[Any], list[int]]:
    """What an engine answers of prompts that differ in their pictures only, one after the other,
    and how much of each it had.
    """
    answers = [engine.generate([asked()], pictures=each, **more)[0] for each in shown]
    return tokens(answers), [answer["cached"] for answer in answers]


def test_behind_other_pictures_nothing_is_shared(stores: Stores, start: Any) -> None:
    settings = {"chunk_tokens": CHUNK}
    alone = start("single", "idefics3", **EXACT)
    one = stores.engine("idefics3", settings, block_size=32, **EXACT)
    other = stores.engine("idefics3", settings, block_size=128, **EXACT)
    right, _ = see(alone.ready(), SHOWN)
    assert len({tuple(each) for each in right}) == len(SHOWN)
    assert see(one.ready(), SHOWN[:1]) == (right[:1], [0])
    stores.until_written(WHOLE // CHUNK)
    assert see(other.ready(), SHOWN[:1]) == (right[:1], [WHOLE])
    stores.assert_equal()
    # what `other` computes is stored too, so the last finds the fourth's chunks before its own
    cached = [BEFORE[0], BEFORE[1], BEFORE[0], BEFORE[1]]
    assert see(other, SHOWN[1:]) == (right[1:], cached)
    assert see(other, SHOWN) == (right, [WHOLE] * 5)
    # a client's own names of the pictures, which may be others tomorrow
    assert see(other, SHOWN[:1], names=["a", "b"]) == (right[:1], BEFORE[:1])
    alone.idle()
    one.idle()
    other.idle()


def test_pictures_that_are_made_otherwise_are_others(stores: Stores) -> None:
    """Two engines whose processors have other options: vLLM's hash does not say so."""
    settings = {"chunk_tokens": CHUNK}
    one = stores.engine("idefics3", settings, **EXACT).ready()
    other = stores.engine(
        "idefics3", settings, mm_processor_kwargs={"image_mean": [0.0, 0.0, 0.0]}, **EXACT
    )
    right, _ = see(one, SHOWN[:1])
    stores.until_written(WHOLE // CHUNK)
    found, cached = see(other.ready(), SHOWN[:1])
    assert cached == BEFORE[:1]
    assert found != right
    assert see(one, SHOWN[:1]) == (right, [WHOLE])
    one.idle()
    other.idle()
