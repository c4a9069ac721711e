"""vLLM and SGLang share requests: one prefills, the other decodes. The tokens are those of either
engine alone, and every live byte is equal in both engines' own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cross.hand_over import compare, from_sglang, from_vllm, vllm_engine
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import EngineFailed, prompts
from tests.engines.vllm.models import save

LENGTHS = (300, 77, 16, 513)
FLOAT = {"dtype": "float32"}
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokens]:
    """The tokens of either engine alone, which must be the same."""
    known: dict[str, Tokens] = {}
    logs = tmp_path_factory.mktemp("single")

    def ask(model: str) -> Tokens:
        if model not in known:
            path = save(model, models)
            asked = prompts(*LENGTHS)
            with closing(vllm_engine("single", path, logs, **FLOAT)) as one:
                found = [one.ready().generate([each])[0]["tokens"][0] for each in asked]
            with closing(Engine("single", path, logs, **FLOAT)) as other:
                assert found == [other.ready().generate([each])[0]["tokens"] for each in asked]
            known[model] = found
        return known[model]

    return ask


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine, which ends with the test: `start(engine, role, model, **arguments)`."""
    started: list[Any] = []

    def one(engine: Any, role: str, model: str, **arguments: Any) -> Any:
        path = save(model, models)
        started.append(engine(role, path, tmp_path / "logs", watch=tmp_path, **FLOAT, **arguments))
        return started[-1]

    yield one
    for each in started:
        each.close()


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("model", ["llama"])
def test_vllm_prefills_and_sglang_decodes(model, engine, start, expected, tmp_path):
    extra = {"engine": engine}
    prefill = start(vllm_engine, "prefill", model, extra=extra, block_size=32)
    decode = start(Engine, "decode", model, extra=extra, page_size=16)
    got = from_vllm(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert nbytes
    assert got == expected(model)
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("model", ["llama"])
def test_sglang_prefills_and_vllm_decodes(model, engine, start, expected, tmp_path):
    extra = {"engine": engine}
    prefill = start(Engine, "prefill", model, extra=extra, page_size=1)
    decode = start(vllm_engine, "decode", model, extra=extra, block_size=64)
    got = from_sglang(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert nbytes
    assert got == expected(model)
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
