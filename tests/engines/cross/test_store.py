"""vLLM and SGLang over one store: what one has computed the other goes on with. The tokens are
those of either engine alone, every live byte is equal in both engines' own tensors, and each engine
itself counts what it has not computed. `make store-demo` tries other pairs.
"""

from __future__ import annotations

import pytest

from tests.engines.cross.store_sides import Place, sglang_side, vllm_side
from tests.engines.cross.test_cross import expected  # noqa: F401
from tests.engines.pair import LENGTHS
from tests.engines.stored import read, recompute, write
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

WAYS = {
    "vLLM to SGLang": (vllm_side, {"block_size": 32}, sglang_side, {"page_size": 16}),
    "SGLang to vLLM": (sglang_side, {"page_size": 1}, vllm_side, {"block_size": 128}),
    "SGLang's 2 ranks to vLLM": (
        sglang_side,
        {"tp": 2, "page_size": 16},
        vllm_side,
        {"block_size": 32},
    ),
    "vLLM to SGLang's 2 ranks": (
        vllm_side,
        {"block_size": 64},
        sglang_side,
        {"tp": 2, "page_size": 16},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_engine_goes_on_with_what_the_other_has_computed(way, expected, models, tmp_path):  # noqa: F811
    first, size, second, other_size = WAYS[way]
    (tmp_path / "store").mkdir()
    url, logs = f"file://{tmp_path}/store", tmp_path / "logs"
    place, model = Place(url=url, watched=tmp_path, logs=logs), save("llama", models)
    right = expected("llama")
    with first(model, place, **size) as writes, second(model, place, **other_size) as reads:
        asked = prompts(*LENGTHS)
        written, alone = write(writes, url, asked), recompute(reads, asked)
        assert [answer.tokens for answer in written.answers] == right
        assert read(written, reads, alone, tmp_path / "compared").faults == []
