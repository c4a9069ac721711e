"""SGLang's engines on hosts of their own: the tokens are those of a single engine, and every live
byte is equal, by the oracle of `tests.engines`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.engines.pair import EXACT, LENGTHS, Pair, compare
from tests.engines.sglang.engines import Engine, asked, handed_over
from tests.engines.vllm.engines import prompts

TP = {"tp_size": 2}
ETH0 = {"options": {"device": "eth0"}}
FIRST, SECOND = ({"options": {"hostname": f"10.77.0.{number}"}} for number in (1, 2))
"""Where Mooncake is read on the hosts of prefill and of decode."""
PAIRS = {
    "nixl, tp 2 to 1": Pair("llama", "nixl", prefill=TP, both=EXACT),
    "nixl on eth0": Pair("llama", "nixl", {"page_size": 16}, {"page_size": 32}, ETH0 | EXACT),
    "mooncake, tp 2 to 1": Pair("llama", "mooncake", prefill=TP, both=EXACT),
    "mooncake at an address": Pair("llama", "mooncake", FIRST, SECOND, EXACT),
}


@pytest.fixture(scope="module")
def engine():
    return Engine


@pytest.fixture(scope="module")
def answer():
    return lambda finished: finished["tokens"]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_on_two_hosts_answers_as_one_engine(name, start, watch, right):
    prefill, decode = PAIRS[name].start(start, watch)
    got = handed_over(prefill, decode, prompts(*LENGTHS))
    assert [one["tokens"] for one in got] == right
    tensors, nbytes, wrong = compare(watch)
    assert tensors and nbytes and not wrong
    prefill.idle(), decode.idle()


@pytest.mark.parametrize("moved_by", ["nixl", "mooncake"])
def test_two_prefills_and_two_decodes_on_four_hosts_answer_as_one_engine(
    moved_by, start, watch, right
):
    """Each of the four pairs has every prompt, all at once."""
    common = {"extra": {"engine": moved_by}, "watch": watch, **EXACT}
    prefills = [start("prefill", "llama", at=at, **common) for at in (0, 1)]
    decodes = [start("decode", "llama", at=at, **common) for at in (2, 3)]
    for one in (*prefills, *decodes):
        one.ready()
    names = [
        (decode, name)
        for prefill, decode in product(prefills, decodes)
        for name in asked(prefill, decode, prompts(*LENGTHS))[1]
    ]
    assert [decode.finished(name)["tokens"] for decode, name in names] == right * 4
    tensors, nbytes, wrong = compare(watch)
    assert tensors and nbytes and not wrong
    for one in (*prefills, *decodes):
        one.idle()
