"""A conversation of three turns that SGLang prefills and vLLM decodes, over one store: SGLang goes
on with what vLLM has generated. The tokens are those of one engine that computes every prompt as a
whole, every live byte is equal, and SGLang counts what it has not computed.
"""

from __future__ import annotations

import time

import pytest

from disagg.store.lookup import REFRESH_SECONDS
from tests.engines.cross.hand_over import both_answers, vllm_engine
from tests.engines.pair import EXACT
from tests.engines.process import ending
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.models import save
from tests.engines.vllm.turns import (
    ANSWER,
    CASES,
    MEETING,
    TOLD,
    answers_alone,
    compare_folders,
    until_stored,
)

CASE = CASES["llama"]
SGLANG = {"disable_radix_cache": False, "radix_cache_backend": "kvpool", "page_size": 16}


@pytest.fixture
def start(models, tmp_path):
    def one(engine, role, watch=None, **arguments):
        if watch is not None:
            watch.mkdir()
        path, logs = save(CASE.model, models), tmp_path / "logs"
        return engine(role, path, logs, watch=watch, **EXACT, **arguments)

    yield from ending(one)


def test_sglangs_prefill_computes_what_is_new_and_less_than_a_chunk_more(start, tmp_path):
    floor = tmp_path / "floor"
    floor.mkdir()
    extra = {"store": f"file://{floor}"}
    generated, read = tmp_path / "generated", tmp_path / "read"
    alone = start(vllm_engine, "single")
    decode = start(vllm_engine, "store", generated, extra=extra, block_size=32)
    environ = {"KVPOOL_WATCH_STORE": "1"}
    prefill = start(Engine, "prefill", read, extra=extra, environ=environ, **SGLANG)
    right = answers_alone(alone.ready(), CASE)
    prefill.ready(), decode.ready()

    def turn(prompt):
        """What SGLang took from the store, and vLLM's answer."""
        ((first, last),) = both_answers(prefill, decode, [prompt], ANSWER)
        (answer,) = last["tokens"]
        until_stored(CASE, floor, [*prompt, *answer])
        return first["cached"], answer

    turn(MEETING)
    time.sleep(REFRESH_SECONDS)
    history, cached, stored = [], [], []
    for words, answer in zip(TOLD, right):
        stored.append(CASE.stored(history))
        tokens, got = turn([*history, *words])
        assert got == answer
        cached.append(tokens)
        history = [*history, *words, *answer]
    assert cached == stored
    # what SGLang has read in turns 2 and 3
    assert len(compare_folders(read, generated, tmp_path / "compared")) >= 2
    decode.idle()
    prefill.idle(cached=True)
