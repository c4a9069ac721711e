"""vLLM and SGLang share requests: one prefills, the other decodes. The tokens are those of either
engine alone, and every live byte is equal in both engines' own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cross.hand_over import compare, from_sglang, from_vllm, vllm_engine
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed, ending
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

Tokens = list[list[int]]


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


WAYS = {
    "vLLM to SGLang": (vllm_engine, {"block_size": 32}, Engine, {"page_size": 16}, from_vllm),
    "SGLang to vLLM": (Engine, {"page_size": 1}, vllm_engine, {"block_size": 64}, from_sglang),
}


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("way", WAYS)
def test_one_engine_prefills_and_the_other_decodes(way, engine, start, expected, tmp_path):
    one, size, other, other_size, hand_over = WAYS[way]
    extra = {"engine": engine}
    prefill = start(one, "prefill", "llama", extra=extra, **size)
    decode = start(other, "decode", "llama", extra=extra, **other_size)
    got = hand_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert nbytes
    assert got == expected("llama")
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
