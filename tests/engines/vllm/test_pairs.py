"""One engine prefills, another decodes: the tokens are those of a single engine, and every live
byte is equal, by an oracle that reads vLLM's own tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from disagg.connectors.vllm.connector import KvpoolConnector
from tests.engines.pair import EXACT, LENGTHS, Pair, compare
from tests.engines.vllm.engines import asked_at_once, handed_over, prefilled, prompts
from tests.ports import free_port


def blocks(prefill: int, decode: int, **here: int) -> dict[str, dict[str, Any]]:
    """Block sizes of both sides, and more of decode."""
    return {"prefill": {"block_size": prefill}, "decode": {"block_size": decode, **here}}


TP = {"tensor_parallel_size": 2}
# on a CPU vLLM's second stage has no place for its input before a model is warmed up
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
PP = {"pipeline_parallel_size": 2, **TRACED}
# a port for each rank of prefill, where its engine is too
PORTS = {"bind": f"tcp://127.0.0.2:{free_port()}+rank", "insecure": True}
PAIRS = {
    "llama 128 to 32": Pair("llama", **blocks(128, 32), both=EXACT),
    "llama 32 to 128": Pair("llama", **blocks(32, 128), both=EXACT),
    "llama tp 2 to 1": Pair("llama", prefill=TP, both=EXACT, extra={"verify": "checksum"}),
    "llama tp 2 to 1, ports": Pair("llama", "mooncake", prefill=TP, both=EXACT, extra=PORTS),
    "llama tp 1 to 2": Pair("llama", decode=TP, both=EXACT),
    "llama nixl": Pair("llama", "nixl", **blocks(128, 32)),
    "llama mooncake": Pair("llama", "mooncake", **blocks(32, 128)),
    "llama chunks": Pair("llama", extra={"stream": "chunks"}, **blocks(128, 32)),
    "llama private memory": Pair("llama", extra={"shared_memory": False}),
    "deepseek_v3": Pair("deepseek_v3"),
    "gpt_oss": Pair("gpt_oss", **blocks(64, 32), both=EXACT),
    "gemma3": Pair("gemma3", both=EXACT),
    "gemma3 mooncake": Pair("gemma3", "mooncake", **blocks(32, 64), both=EXACT),
    "qwen3_next": Pair("qwen3_next"),
    "qwen3_next chunks": Pair("qwen3_next", extra={"stream": "chunks"}),
    "llama layers": Pair("llama", extra={"stream": "layers"}, **blocks(128, 32)),
    "gpt_oss layers": Pair("gpt_oss", both=EXACT, extra={"stream": "layers"}),
    "qwen3_next layers": Pair("qwen3_next", extra={"stream": "layers"}),
    "gemma3 tp 1 to 2, 16 to 96": Pair("gemma3", **blocks(16, 96, **TP), both=EXACT),
    "gpt_oss tp 1 to 2, 96 to 16": Pair("gpt_oss", **blocks(96, 16, **TP), both=EXACT),
    "falcon_h1": Pair("falcon_h1", both=EXACT),
    "falcon_h1 tp 2 to 1": Pair("falcon_h1", prefill=TP, both=EXACT),
    "falcon_h1 tp 1 to 2": Pair("falcon_h1", decode=TP, both=EXACT),
    "lfm2": Pair("lfm2", both=EXACT),
    "lfm2 tp 2 to 1": Pair("lfm2", prefill=TP, both=EXACT),
    "lfm2 tp 1 to 2": Pair("lfm2", decode=TP, both=EXACT),
    "llama pp 2 to 1": Pair("llama", prefill=PP, both=EXACT),
    "llama pp 1 to 2": Pair("llama", decode=PP, both=EXACT),
    "llama pp 2 to 2, chunks": Pair("llama", both={**PP, **EXACT}, extra={"stream": "chunks"}),
    "llama pp 2 and tp 2 to 1": Pair("llama", prefill={**PP, **TP}, both=EXACT),
    "falcon_h1 pp 2 to 1": Pair("falcon_h1", prefill=PP, both=EXACT),
    "falcon_h1 pp 1 to 2": Pair("falcon_h1", decode=PP, both=EXACT),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_and_bytes_are_those_of_one_engine(name, start, expected, tmp_path):
    pair = PAIRS[name]
    prefill, decode = pair.start(start, tmp_path)
    asked = prompts(*LENGTHS)
    got = handed_over(prefill.ready(), decode.ready(), asked)
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
    assert got == expected(pair.model, **pair.both)
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (2, 2)])
def test_states_of_delta_nets_are_equal_across_ranks(there, here, start, expected, tmp_path):
    """Tokens only where both sides have as many: sums in bfloat16 are rounded by the ranks."""
    sides = [{"tensor_parallel_size": ranks, "watch": tmp_path} for ranks in (there, here)]
    prefill = start("prefill", "qwen3_next", **sides[0])
    decode = start("decode", "qwen3_next", **sides[1])
    got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes and not wrong, f"{wrong}\n{decode.tail()}\n{prefill.tail()}"
    assert there != here or got == expected("qwen3_next", tensor_parallel_size=here)
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize(
    ("stream", "decode_stream"), [("chunks", None), ("chunks", "layers"), ("layers", "layers")]
)
def test_decode_may_be_asked_while_prefill_computes(
    stream, decode_stream, start, expected, tmp_path
):
    """Prompts are computed in chunks of at most 128 tokens, some of several requests."""
    few = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 96}
    prefill = start("prefill", "llama", extra={"stream": stream}, watch=tmp_path, **few, **EXACT)
    decode = start("decode", "llama", extra={"stream": decode_stream}, watch=tmp_path, **EXACT)
    params = prefilled(prefill.ready(), [[7, 8]])
    decode.ready().generate([[7, 8]], tokens=1, params=params)
    addresses = params[0]["remote_addresses"]
    sent, asked = asked_at_once(prefill, decode, prompts(*LENGTHS), 24, addresses)
    got = [decode.finished(name)["tokens"][0] for name in asked]
    assert [prefill.finished(name)["reason"] for name in sent] == [["length"]] * len(sent)
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes
    assert not wrong
    assert got == expected("llama", **EXACT)
    prefill.idle()
    decode.idle()


def test_a_reader_that_leaves_while_prefill_computes_leaves_both_engines_whole(start, expected):
    few = {"max_num_batched_tokens": 32, **EXACT}
    prefill = start("prefill", "llama", extra={"stream": "chunks"}, **few).ready()
    decode = start("decode", "llama", **EXACT).ready()
    params, asked = prefilled(prefill, [[7, 8]]), prompts(*LENGTHS)
    sent, read = asked_at_once(prefill, decode, asked, 24, params[0]["remote_addresses"])
    for name in read:
        decode.send(do="abort", id=name)
    decode.idle()
    assert [prefill.finished(name)["reason"] for name in sent] == [["length"]] * len(sent)
    assert decode.generate([[7, 8]], tokens=1, params=params)[0]["reason"] == ["length"]
    prefill.idle()
    assert handed_over(prefill, decode, asked) == expected("llama", **EXACT)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_layers_that_do_not_come_are_computed_or_fail_their_request(policy, start, expected):
    """Decode waits for them in its forward pass; prefill is killed before they are read."""
    prefill = start("prefill", "llama", extra={"stream": "layers"}, **EXACT)
    decode = start("decode", "llama", extra={"stream": "layers"}, policy=policy, **EXACT)
    asked = prompts(*LENGTHS)
    right = expected("llama", **EXACT)
    assert handed_over(prefill.ready(), decode.ready(), asked[:1]) == right[:1]
    params = prefilled(prefill, asked[1:])
    prefill.kill()
    got = decode.generate(asked[1:], params=params)
    if policy == "fail":
        assert [one["reason"] for one in got] == [["error"]] * len(got)
    else:
        assert [one["tokens"][0] for one in got] == right[1:]
    decode.idle()


def test_noise_in_what_was_received_changes_the_tokens(start, expected, tmp_path):
    """The control: the prompts and models here can tell right state from wrong."""
    prefill = start("prefill", "llama", watch=tmp_path)
    decode = start("decode", "llama", watch=tmp_path, noise=True)
    got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    assert compare(tmp_path)[2]
    assert all(one != other for one, other in zip(got[:2], expected("llama")))


def test_decode_asks_only_for_what_it_lacks(start, expected):
    """With prefix caching on both sides, and with a prompt that decode has whole."""
    prefill = start("prefill", "llama", enable_prefix_caching=True, block_size=32)
    decode = start("decode", "llama", enable_prefix_caching=True, block_size=32)
    prefill.ready(), decode.ready()
    asked = prompts(*LENGTHS)
    assert handed_over(prefill, decode, asked) == expected("llama")
    assert handed_over(prefill, decode, asked) == expected("llama")
    longer = [[*asked[0][:288], 9], asked[0] + prompts(70, seed=5)[0]]
    first = handed_over(prefill, decode, longer)
    with_one = start("single", "llama", block_size=32).ready()
    assert first == [one["tokens"][0] for one in with_one.generate(longer)]
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize("length", [299, 310])
def test_a_window_that_was_handed_over_serves_no_other_prompt(length, start):
    """vLLM would find its first block by the tokens, of which a part was not handed over."""
    options = {"enable_prefix_caching": True, "block_size": 32, **EXACT}
    prefill, decode = start("prefill", "gemma3", **options), start("decode", "gemma3", **options)
    asked = prompts(length)
    handed_over(prefill.ready(), decode.ready(), asked, tokens=2)
    longer = [[*asked[0][:-3], *prompts(40, seed=5)[0]]]
    single = start("single", "gemma3", block_size=32, **EXACT).ready()
    right = [one["tokens"] for one in single.generate(longer)]
    assert [one["tokens"] for one in decode.generate(longer)] == right
    assert [tokens for (tokens,) in right] == handed_over(prefill, decode, longer)


def test_short_repeated_and_mixed_up_prompts(start, expected):
    """A prompt of one token, two sequences of a prompt, and a proxy that mixes requests up, or two
    tokenizers: decode computes the prompt itself.
    """
    prefill, decode = start("prefill", "llama", **EXACT), start("decode", "llama", **EXACT)
    single = start("single", "llama", **EXACT).ready()
    got = handed_over(prefill.ready(), decode.ready(), [[7], [8, 9]])
    assert got == [one["tokens"][0] for one in single.generate([[7], [8, 9]])]
    asked, right = prompts(*LENGTHS)[:1], expected("llama", **EXACT)[:1]
    twice = decode.generate(asked, tokens=24, n=2, params=prefilled(prefill, asked))
    assert twice[0]["tokens"] == right * 2
    other = prefilled(prefill, prompts(300, seed=9))
    assert decode.generate(asked, params=other)[0]["tokens"] == right
    assert "another prompt" in decode.tail(100_000)
    prefill.idle()
    decode.idle()


def test_preempted_requests_are_computed_again(start):
    """Decode has blocks for about one and a half of these requests at their end."""
    few = {"num_gpu_blocks_override": 18, "max_model_len": 512, "block_size": 32}
    prefill = start("prefill", "llama", block_size=32, **EXACT)
    decode = start("decode", "llama", **few, **EXACT)
    single = start("single", "llama", block_size=32, **EXACT).ready()
    asked = prompts(200, 220, seed=3)
    got = handed_over(prefill.ready(), decode.ready(), asked, tokens=150)
    assert got == [one["tokens"][0] for one in single.generate(asked, tokens=150)]
    prefill.idle()
    decode.idle()


THETAS = "10000.0 on prefill, 500000.0 on decode"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("gpt_oss", {}, "target layers 0, 2 swa.k: prefill offers no such region"),
        # weights, shapes and dtypes are the same: nothing else would tell
        ("llama", {"hf_overrides": ROPE}, f"rope_theta: {THETAS}. Run the same model"),
    ],
)
def test_another_model_is_refused_by_name_on_both_sides(model, options, words, start):
    prefill, decode = start("prefill", "llama").ready(), start("decode", model, **options).ready()
    asked = prompts(40)
    got = decode.generate(asked, params=prefilled(prefill, asked))
    assert got[0]["reason"] == ["error"]
    for side in (prefill, decode):
        side.idle()
        text = side.tail(100_000)
        assert words in text
        assert model != "llama" or "weights:" not in text


@pytest.mark.parametrize("extra", [{"engine": "none"}, {"speed": 11}])
def test_a_wrong_setting_ends_the_start(extra, start):
    engine = start("prefill", "llama", extra=extra)
    assert engine.ended(120)
    assert next(iter(extra)) in engine.tail()


def test_memory_that_moves_is_refused_at_start():
    """vLLM has sleep mode on GPUs only."""
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    with pytest.raises(
        ValueError, match=r"enable_sleep_mode True: .*Leave --enable-sleep-mode out"
    ):
        KvpoolConnector(config, KVConnectorRole.WORKER, None)
