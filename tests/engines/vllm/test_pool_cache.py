"""vLLM prefills and `transformers` over kvpool's own pool decodes, and the other way round: the
tokens are those of one vLLM engine and of plain transformers (float32, greedy).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool.integrations.transformers import PoolCache
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.transformer import STEPS, Transformer
from tests.engines.vllm.engines import prefilled, prompts

FAMILIES = ["llama", "gpt_oss", "gemma3", "deepseek_v3"]
PATIENCE = 60.0
RECURRENT = {"mamba_ssm_cache_dtype": "float32"}
"""As transformers keeps it. vLLM's own default depends on the CPU."""


@contextmanager
def received(side: Transformer, params: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """The requests that prefill's answers name, read to the pool."""
    with DecodeEndpoint(side.pool.layout, create_engine("local"), verify="checksum") as endpoint:
        link = endpoint.connect(params[0]["remote_addresses"], timeout=PATIENCE)
        requests = [side.allocator.new_request() for _ in params]
        for request, answer in zip(requests, params):
            side.allocator.extend(request, answer["remote_num_tokens"], received=True)
            endpoint.receive(answer["remote_request_id"], request.address(), link=link)
        for answer in params:
            state = endpoint.wait(answer["remote_request_id"], PATIENCE)
            assert state is KVPoll.Success, endpoint.failure(answer["remote_request_id"])
        yield requests


@contextmanager
def offered(side: Transformer, asked: list[list[int]]) -> Iterator[list[dict[str, Any]]]:
    """What a prefill's answers would name, of prompts that are in the pool but for their last
    token.
    """
    with PrefillEndpoint(side.pool.layout, create_engine("local")) as endpoint:
        answers = []
        for number, prompt in enumerate(asked):
            cache = PoolCache.new(side.pool, side.allocator)
            side.logits(cache, prompt[:-1])
            endpoint.send(f"room {number}", cache.requests[0].address())
            named = {"remote_request_id": f"room {number}", "remote_addresses": [endpoint.address]}
            tokens = {"do_remote_prefill": True, "remote_num_tokens": len(prompt) - 1}
            answers.append({**named, **tokens})
        yield answers
        for answer in answers:
            room = answer["remote_request_id"]
            assert endpoint.wait(room, PATIENCE) is KVPoll.Success, endpoint.failure(room)


@pytest.mark.parametrize("family", FAMILIES)
def test_either_decodes_what_the_other_has_prefilled(family, start, expected, transformer):
    side, asked, got = transformer(family), prompts(*LENGTHS), []
    right = expected(family, **EXACT)
    assert right == [side.alone(prompt) for prompt in asked]
    prefill, decode = start("prefill", family, **EXACT), start("decode", family, **EXACT)
    with received(side, prefilled(prefill.ready(), asked)) as requests:
        for request, prompt in zip(requests, asked):
            assert request.num_tokens == len(prompt) - 1
            cache = PoolCache(side.pool, side.allocator, [request])
            got.append(side.greedy(cache, prompt[-1:]))
            side.allocator.free(request)
    assert got == right
    with offered(side, asked) as params:
        answers = decode.ready().generate(asked, tokens=STEPS, params=params)
    assert [one["tokens"][0] for one in answers] == right
    prefill.idle()
    decode.idle()


def test_a_delta_nets_state_arrives_as_transformers_computes_it(start, transformer):
    """vLLM has delta nets in bfloat16 only on a CPU, where the two do not round alike: states are
    close, and those of another order are not. No token is decoded: PoolCache needs transformers
    5.23 for that, vLLM 0.32 comes with 5.19.
    """
    side, asked = transformer("qwen3_next", "bfloat16"), prompts(*LENGTHS)[:2]
    prefill = start("prefill", "qwen3_next", **RECURRENT).ready()
    with received(side, prefilled(prefill, asked)) as requests:
        for request, prompt in zip(requests, asked):
            own = PoolCache.new(side.pool, side.allocator)
            side.logits(own, prompt[:-1])
            for name, here, there in states(side, request, own.requests[0]):
                assert far(here, there) < 0.3, name
                if name.endswith("temporal"):
                    assert far(here.transpose(-1, -2), there) > 1, name
            side.allocator.free(own.requests[0])
    prefill.idle()


def states(side: Transformer, *requests: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What two requests hold, by layer and role."""
    pool, where = side.pool, [side.allocator.locations(request) for request in requests]
    for layer, kind in enumerate(side.model.config.layer_types):
        if kind == "linear_attention":
            names = "conv", "temporal"
            pairs = [pool.get_linear_state(layer, at["state"][:1]) for at in where]
        else:
            names, pairs = ("k", "v"), [pool.get_kv_buffer(layer, at["kv"]) for at in where]
        for name, here, there in zip(names, *pairs):
            yield f"layer {layer} {name}", here.float(), there.float()


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two tensors, relative to the second."""
    return float((one - other).norm() / other.norm())


def test_vllm_goes_on_from_a_delta_nets_state_of_transformers(start, expected, transformer):
    side, asked = transformer("qwen3_next", "bfloat16"), prompts(*LENGTHS)
    decode = start("decode", "qwen3_next", **RECURRENT).ready()
    with offered(side, asked) as params:
        got = [one["tokens"][0] for one in decode.generate(asked, tokens=STEPS, params=params)]
    decode.idle()
    assert [one[:1] for one in got] == [one[:1] for one in expected("qwen3_next", **RECURRENT)]


def test_latents_and_rope_keys_are_those_of_transformers(start, transformer):
    """The tokens of this model hardly depend on rope keys. In layer 0 those of one token repeated
    differ by their rotation only. vLLM 0.32's CPU kernel takes a tensor's rows for as wide as a key
    (64): they are 704 here (query 128, latent 512, key 64), so the key of position p is rotated as
    that of 11 p, and from the place on where these end, not at all.
    """
    side, asked = transformer("deepseek_v3"), [[7] * 300]
    prefill = start("prefill", "deepseek_v3", **EXACT).ready()
    with received(side, prefilled(prefill, asked)) as requests:
        own = PoolCache.new(side.pool, side.allocator)
        side.logits(own, asked[0][:-1])
        (latent, rope), (own_latent, own_rope) = (
            side.pool.get_kv_buffer(0, side.allocator.locations(request)["kv"])
            for request in (requests[0], own.requests[0])
        )
        rotated = own_rope[::11]
        assert far(latent, own_latent) < 1e-3
        assert far(rope[: len(rotated)], rotated) < 1e-3
        halves = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        assert far(rope[: len(rotated)], halves) > 0.5
    prefill.idle()
