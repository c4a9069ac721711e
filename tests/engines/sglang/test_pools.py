"""A request moves between two of SGLang's real pools of differing geometry; every byte is compared
with SGLang's own indexing of its tensors.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from tests.engines.sglang import sides
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import PAGES, hand_over, request

TOKENS = 83


@pytest.mark.parametrize("there", [1, 16, 64])
@pytest.mark.parametrize("here", [1, 16, 64])
def test_pages_of_any_size_pair(here, there, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 100)
    made = [
        Side(sides.mha(page), request(page, TOKENS, seed, 100))
        for seed, page in enumerate((there, here))
    ]
    assert hand_over(made[:1], made[1:]) == TOKENS * 4 * 2 * 4 * 8 * 4
