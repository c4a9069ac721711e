"""One engine prefills, another decodes: the tokens are those of a single engine, and every live
byte is equal, by an oracle that reads SGLang's own tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engines.pair import EXACT, LENGTHS, Pair, compare
from tests.engines.sglang.engines import asked, failure, handed_over
from tests.engines.vllm.engines import prompts


def pages(prefill: int, decode: int) -> dict[str, dict[str, Any]]:
    """Page sizes of both sides."""
    return {"prefill": {"page_size": prefill}, "decode": {"page_size": decode}}


TP, PP = {"tp_size": 2}, {"pp_size": 2}
CHUNKS = {"chunked_prefill_size": 128}
PAIRS = {
    "llama 1 to 16": Pair("llama", **pages(1, 16), extra={"verify": "checksum"}),
    "llama 16 to 1": Pair("llama", **pages(16, 1)),
    "llama nixl": Pair("llama", "nixl", **pages(16, 32)),
    "llama mooncake": Pair("llama", "mooncake", **pages(32, 16)),
    "llama chunks": Pair("llama", prefill={"page_size": 16, **CHUNKS}, both=EXACT),
    "llama tp 2 to 1": Pair("llama", prefill=TP, both=EXACT, extra={"verify": "checksum"}),
    "llama tp 1 to 2": Pair("llama", decode=TP, both=EXACT),
    "llama pp 2 to 1": Pair("llama", prefill=PP, extra={"verify": "checksum"}),
    "llama pp 1 to 2": Pair("llama", decode=PP),
    "llama pp 2 to 2, chunks": Pair("llama", prefill=PP | CHUNKS, decode=PP),
    "llama pp 2, tp 2 to tp 2": Pair("llama", prefill=PP | TP, decode=TP, both=EXACT),
    "gemma3": Pair("gemma3", both=EXACT, **pages(16, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_and_bytes_are_those_of_one_engine(name, start, expected, tmp_path):
    pair = PAIRS[name]
    prefill, decode = pair.start(start, tmp_path)
    got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS), logprobs=True)
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
    want = expected(pair.model, **pair.both)
    assert [one["tokens"] for one in got] == [one["tokens"] for one in want]
    for one, right in zip(got, want):
        ours, theirs = ([[each[0] for each in a["logprobs"][0]]] for a in (one, right))
        assert np.allclose(ours, theirs, atol=0.05 if pair.both != EXACT else 1e-4)
    prefill.idle()
    decode.idle()


def test_noise_in_what_was_received_changes_the_tokens(start, expected, tmp_path):
    """The control: the prompts and models here can tell right state from wrong."""
    prefill = start("prefill", "llama", watch=tmp_path)
    decode = start("decode", "llama", watch=tmp_path, noise=True)
    got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    assert compare(tmp_path)[2]
    assert all(one["tokens"] != right["tokens"] for one, right in zip(got[:2], expected("llama")))


def test_decode_asks_only_for_what_it_lacks(start, expected):
    """With a radix cache on both sides: the second time decode has all full pages."""
    cached = {"disable_radix_cache": False, "page_size": 16}
    prefill = start("prefill", "llama", **cached)
    decode = start("decode", "llama", disaggregation_decode_enable_radix_cache=True, **cached)
    right, read = [one["tokens"] for one in expected("llama")], []
    for _ in range(2):
        got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
        assert [one["tokens"] for one in got] == right
        prefill.idle(cached=True)
        read.append(sum(rank["read"] for rank in decode.held()))
    token = 4 * 2 * 4 * 32 * 2  # layers, K and V, heads, dim, bytes
    assert read[0] == sum(LENGTHS) * token
    assert read[1] == sum(n % 16 for n in LENGTHS) * token


def test_another_model_is_refused_by_name_on_both_sides(start):
    prefill, decode = start("prefill", "llama").ready(), start("decode", "gemma3").ready()
    first, last = asked(prefill, decode, prompts(40))
    assert "target layer" in failure(decode.finished(last[0]))
    assert "target layer" in failure(prefill.finished(first[0]))
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize("extra", [{"engine": "none"}, {"speed": 11}])
def test_a_wrong_setting_ends_the_start(extra, start):
    engine = start("prefill", "llama", extra=extra)
    assert engine.ended()
    assert next(iter(extra)) in engine.tail()
