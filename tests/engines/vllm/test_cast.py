"""vLLM decodes in another dtype than prefill has computed in."""

from __future__ import annotations

import pytest
import torch

from tests.engines.pair import LENGTHS, Pair, compare
from tests.engines.vllm.engines import handed_over, prompts


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("given", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_every_value_is_rounded_to_the_nearest(model, given, wanted, start, tmp_path):
    pair = Pair(
        model,
        prefill={"dtype": given, "block_size": 128},
        decode={"dtype": wanted, "block_size": 32},
        extra={"cast": True, "verify": "checksum"},
    )
    prefill, decode = pair.start(start, tmp_path)
    got = handed_over(prefill, decode, prompts(*LENGTHS))
    assert all(got)
    tensors, nbytes, wrong = compare(tmp_path, dtype=getattr(torch, wanted))
    assert not wrong
    assert tensors and nbytes
    prefill.idle()
    decode.idle()
