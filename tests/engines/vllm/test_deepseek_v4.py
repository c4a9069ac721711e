"""DeepSeek-V4: one engine prefills, another decodes. Every live byte of its windows, compressed
tokens, index keys, and tokens that are not yet compressed is equal, and the tokens are those of a
single engine.

vLLM's own CPU kernels compute it and write its caches, by vLLM's slot mappings. Of what prepares a
step for them, Triton kernels have plain torch in their place (`tests.engines.vllm.deepseek_v4`).
"""

from __future__ import annotations

import pytest

from tests.engines.pair import LENGTHS, Pair, compare
from tests.engines.vllm.engines import handed_over, prompts

TP = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("extra", [{"verify": "checksum"}, {"stream": "layers"}])
def test_tokens_are_those_of_one_engine(extra, start, expected, tmp_path):
    prefill, decode = Pair("deepseek_v4", extra=extra).start(start, tmp_path)
    got = handed_over(prefill, decode, prompts(*LENGTHS))
    tensors, nbytes, wrong = compare(tmp_path)
    assert tensors > 4 * len(LENGTHS) and nbytes and not wrong
    assert got == expected("deepseek_v4")
    prefill.idle()
    decode.idle()


@pytest.mark.parametrize("sides", [{"prefill": TP}, {"decode": TP}], ids=["2 to 1", "1 to 2"])
def test_tensor_parallel_sizes_may_differ(sides, start, tmp_path):
    """Sums in bfloat16 are rounded by the ranks, so tokens may differ."""
    prefill, decode = Pair("deepseek_v4", **sides).start(start, tmp_path)
    handed_over(prefill, decode, prompts(*LENGTHS), tokens=2)
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes and not wrong
    prefill.idle()
    decode.idle()


def test_noise_in_what_was_received_changes_the_tokens(start, expected, tmp_path):
    """The control."""
    prefill = start("prefill", "deepseek_v4", watch=tmp_path)
    decode = start("decode", "deepseek_v4", watch=tmp_path, noise=True)
    got = handed_over(prefill.ready(), decode.ready(), prompts(*LENGTHS))
    assert compare(tmp_path)[2]
    assert all(one != other for one, other in zip(got[:2], expected("deepseek_v4")))
