"""vLLM and SGLang share requests: one prefills, the other decodes. The tokens are those of either
engine alone, and every live byte is equal in both engines' own tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.cross.hand_over import from_sglang, from_vllm, vllm_engine
from tests.engines.pair import EXACT, LENGTHS, compare
from tests.engines.process import EngineFailed
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

Tokens = list[list[int]]
WINDOW = 128
"""Of gemma3's layers."""


@pytest.fixture(scope="module")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokens]:
    """The tokens of either engine alone, which must be the same."""
    known: dict[str, Tokens] = {}
    logs = tmp_path_factory.mktemp("single")

    def ask(model: str) -> Tokens:
        if model not in known:
            path = save(model, models)
            asked = prompts(*LENGTHS)
            with vllm_engine("single", path, logs, **EXACT).ready() as one:
                found = [one.generate([each])[0]["tokens"][0] for each in asked]
            with Engine("single", path, logs, **EXACT).ready() as other:
                assert found == [other.generate([each])[0]["tokens"] for each in asked]
            known[model] = found
        return known[model]

    return ask


WHOLE = {"block_size": 64, "disable_hybrid_kv_cache_manager": True}
"""vLLM keeps all positions of windows too, as SGLang does on a CPU."""
VLLM_TP, SGLANG_TP = {"tensor_parallel_size": 2, "block_size": 32}, {"tp_size": 2, "page_size": 16}
WAYS = {
    "vLLM to SGLang": (vllm_engine, {"block_size": 32}, Engine, {"page_size": 16}),
    "SGLang to vLLM": (Engine, {"page_size": 1}, vllm_engine, {"block_size": 64}),
    "vLLM's 2 ranks to SGLang": (vllm_engine, VLLM_TP, Engine, {"page_size": 16}),
    "SGLang to vLLM's 2 ranks": (Engine, {"page_size": 64}, vllm_engine, VLLM_TP),
    "SGLang's 2 ranks to vLLM": (Engine, SGLANG_TP, vllm_engine, {"block_size": 64}),
    "vLLM to SGLang's 2 ranks": (vllm_engine, {"block_size": 64}, Engine, SGLANG_TP),
    "windows, SGLang to vLLM": (Engine, {"page_size": 16}, vllm_engine, {"block_size": 64}),
    "windows, vLLM to SGLang": (vllm_engine, WHOLE, Engine, {"page_size": 16}),
}
ENGINES = {"vLLM to SGLang": ("local", "nixl"), "SGLang to vLLM": ("local", "mooncake")}


@pytest.mark.parametrize(
    ("way", "engine"), [(way, engine) for way in WAYS for engine in ENGINES.get(way, ("local",))]
)
def test_one_engine_prefills_and_the_other_decodes(way, engine, start, expected, tmp_path):
    one, size, other, other_size = WAYS[way]
    model = "gemma3" if "windows" in way else "llama"
    prefill = start(one, "prefill", model, extra={"engine": engine}, **size)
    decode = start(other, "decode", model, extra={"engine": engine}, **other_size)
    hand_over = from_sglang if one is Engine else from_vllm
    got = hand_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    tensors, nbytes, wrong = compare(tmp_path, last=WINDOW - 1 if model == "gemma3" else None)
    assert not wrong
    assert tensors and nbytes
    assert got == expected(model)
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize(
    ("model", "other", "length", "cut", "words"),
    [
        # SGLang would keep them for the next request of that prefix
        ("gemma3", "gemma3", 300, 1, "keeps entries from 172 on alive, the destination needs 0 to"),
        ("llama", "llama", 77, 0, "prefill computed 76 tokens, decode made room for 77"),
        # the layout is the same: only what rope makes of a key is not
        ("llama", "llama_other_rope", 77, 1, "rope_theta"),
    ],
    ids=["windows", "another length", "another model"],
)
def test_what_does_not_fit_is_refused_by_name(model, other, length, cut, words, start):
    prefill = start(vllm_engine, "prefill", model).ready()
    decode = start(Engine, "decode", other, page_size=16).ready()
    with pytest.raises(EngineFailed, match=words):
        from_vllm(prefill, decode, prompts(length), cut=cut)
    prefill.idle()
    decode.idle()
