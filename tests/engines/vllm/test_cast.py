"""vLLM decodes with KV in another format than prefill has computed."""

from __future__ import annotations

import pytest
import torch

from tests.engines.pair import LENGTHS, Pair, compare
from tests.engines.vllm.engines import handed_over, prompts

BF16, F32 = {"dtype": "bfloat16"}, {"dtype": "float32"}
FP8 = {"kv_cache_dtype": "fp8"}
E4M3 = torch.float8_e4m3fn


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(E4M3).view(torch.uint8)


WAYS = {
    "bfloat16 to float32": (BF16, F32, torch.Tensor.float),
    "float32 to bfloat16": (F32, BF16, torch.Tensor.bfloat16),
    "bfloat16 to fp8": (BF16, {**BF16, **FP8}, to_e4m3),
    "fp8 to bfloat16": ({**BF16, **FP8}, BF16, lambda stored: stored.view(E4M3).bfloat16()),
}
MODELS = ("llama", *WAYS), ("gpt_oss", *[*WAYS][:2]), ("deepseek_v3", *[*WAYS][:2])
CASES = [(model, way) for model, *ways in MODELS for way in ways]


DECODE = {"cast": True, "verify": "checksum"}
PREFILL = {"convert_to": "float8_e4m3fn", "convert_room": "64MiB", "verify": "checksum"}


@pytest.mark.parametrize(
    ("model", "way", "extra"),
    [*((*case, DECODE) for case in CASES), ("llama", "bfloat16 to fp8", PREFILL)],
)
def test_every_value_is_rounded_to_the_nearest(model, way, extra, start, tmp_path):
    given, wanted, converted = WAYS[way]
    prefill, decode = {**given, "block_size": 128}, {**wanted, "block_size": 32}
    pair = Pair(model, prefill=prefill, decode=decode, extra=extra)
    prefill, decode = pair.start(start, tmp_path)
    got = handed_over(prefill, decode, prompts(*LENGTHS))
    assert all(got)
    tensors, nbytes, wrong = compare(tmp_path, converted=converted)
    assert not wrong
    assert tensors and nbytes
    prefill.idle()
    decode.idle()
