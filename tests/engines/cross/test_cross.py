"""vLLM and SGLang share requests: one prefills, the other decodes. The tokens are those of either
engine alone, and every live byte is equal in both engines' own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cross.hand_over import from_sglang, from_vllm, vllm_engine
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed, ending
from tests.engines.saved import compare
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


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine, which ends with the test: `start(engine, role, model, **arguments)`."""

    def one(engine: Any, role: str, model: str, **arguments: Any) -> Any:
        logs = tmp_path / "logs"
        return engine(role, save(model, models), logs, watch=tmp_path, **EXACT, **arguments)

    yield from ending(one)


VLLM_TP, SGLANG_TP = {"tensor_parallel_size": 2, "block_size": 32}, {"tp_size": 2, "page_size": 16}
WAYS = {
    "vLLM to SGLang": (vllm_engine, {"block_size": 32}, Engine, {"page_size": 16}, from_vllm),
    "SGLang to vLLM": (Engine, {"page_size": 1}, vllm_engine, {"block_size": 64}, from_sglang),
    "vLLM's 2 ranks to SGLang": (vllm_engine, VLLM_TP, Engine, {"page_size": 16}, from_vllm),
    "SGLang to vLLM's 2 ranks": (Engine, {"page_size": 64}, vllm_engine, VLLM_TP, from_sglang),
    "SGLang's 2 ranks to vLLM": (Engine, SGLANG_TP, vllm_engine, {"block_size": 64}, from_sglang),
    "vLLM to SGLang's 2 ranks": (vllm_engine, {"block_size": 64}, Engine, SGLANG_TP, from_vllm),
}


@pytest.mark.parametrize(
    ("way", "engine"),
    [
        (way, engine)
        for way in WAYS
        for engine in (("local",) if "ranks" in way else ("local", "nixl", "mooncake"))
    ],
)
def test_one_engine_prefills_and_the_other_decodes(way, engine, start, expected, tmp_path):
    one, size, other, other_size, hand_over = WAYS[way]
    extra = {"engine": engine}
    prefill = start(one, "prefill", "llama", extra=extra, **size)
    decode = start(other, "decode", "llama", extra=extra, **other_size)
    got = hand_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
    assert got == expected("llama")
    prefill.idle()
    decode.idle()


WHOLE = {"disable_hybrid_kv_cache_manager": True}
"""vLLM keeps all positions of windows too."""


@pytest.mark.parametrize(
    ("one", "size", "other", "other_size", "hand_over"),
    [
        (Engine, {"page_size": 16}, vllm_engine, {"block_size": 64}, from_sglang),
        (vllm_engine, {"block_size": 64, **WHOLE}, Engine, {"page_size": 16}, from_vllm),
    ],
    ids=["SGLang to vLLM", "vLLM to SGLang"],
)
def test_windows(one, size, other, other_size, hand_over, start, expected, tmp_path):
    """SGLang holds all positions of them on a CPU."""
    prefill = start(one, "prefill", "gemma3", **size)
    decode = start(other, "decode", "gemma3", **other_size)
    got = hand_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    tensors, nbytes, wrong = compare(tmp_path, last=WINDOW - 1)
    assert not wrong
    assert tensors and nbytes
    assert got == expected("gemma3")
    prefill.idle()
    decode.idle()


def test_an_engine_that_holds_all_positions_is_not_given_windows(start):
    """SGLang would keep them for the next request of that prefix."""
    prefill = start(vllm_engine, "prefill", "gemma3").ready()
    decode = start(Engine, "decode", "gemma3", page_size=16).ready()
    with pytest.raises(
        EngineFailed, match="keeps entries from 172 on alive, the destination needs 0 to 298"
    ):
        from_vllm(prefill, decode, prompts(300))
    prefill.idle()
    decode.idle()


def test_a_prompt_of_another_length_is_refused(start):
    prefill = start(vllm_engine, "prefill", "llama").ready()
    decode = start(Engine, "decode", "llama", page_size=16).ready()
    said = "prefill computed 76 tokens, decode made room for 77"
    with pytest.raises(EngineFailed, match=said):
        from_vllm(prefill, decode, prompts(77), cut=0)
    prefill.idle()
    decode.idle()


def test_another_model_is_refused_by_name(start):
    """Its layout is the same: only what rope makes of a key is not."""
    prefill = start(vllm_engine, "prefill", "llama").ready()
    decode = start(Engine, "decode", "llama_other_rope", page_size=16).ready()
    with pytest.raises(EngineFailed, match="rope_theta"):
        from_vllm(prefill, decode, prompts(77))
    prefill.idle()
    decode.idle()
