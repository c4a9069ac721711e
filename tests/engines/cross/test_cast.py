"""One engine decodes with KV in another format than the other has computed."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cross.hand_over import from_sglang, from_vllm, vllm_engine
from tests.engines.pair import LENGTHS, compare
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import prompts

E4M3 = torch.float8_e4m3fn
BF16 = {"dtype": "bfloat16"}
FP8 = {**BF16, "kv_cache_dtype": "fp8", "block_size": 64}


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(E4M3).view(torch.uint8)


WAYS = {
    "SGLang's bfloat16 to vLLM's fp8": (Engine, BF16, vllm_engine, FP8, to_e4m3),
    "vLLM's fp8 to SGLang's bfloat16": (
        *(vllm_engine, FP8, Engine, {**BF16, "page_size": 16}),
        lambda stored: stored.view(E4M3).bfloat16(),
    ),
    "SGLang's bfloat16 to vLLM's float32": (
        *(Engine, BF16, vllm_engine, {"block_size": 32}),
        torch.Tensor.float,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_value_is_rounded_to_the_nearest(way, start, tmp_path):
    one, given, other, wanted, converted = WAYS[way]
    prefill = start(one, "prefill", "llama", extra={}, **given)
    decode = start(other, "decode", "llama", extra={"cast": True}, **wanted)
    hand_over = from_sglang if one is Engine else from_vllm
    assert all(hand_over(prefill.ready(), decode.ready(), prompts(*LENGTHS)))
    tensors, nbytes, wrong = compare(tmp_path, converted=converted)
    assert not wrong
    assert tensors and nbytes
