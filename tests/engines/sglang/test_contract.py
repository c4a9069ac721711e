"""Each rank gives its part of its engine's contract; together they say what the hand-over shows."""

from __future__ import annotations

from disagg.contract import Fit, labels, read_contract
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.sglang.engines import handed_over
from tests.engines.vllm.engines import prompts
from tests.ports import free_port


def contract(place: str):
    return read_contract(f"http://{place}")


def test_two_engines_that_fit_say_so_and_hand_over(start, expected):
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    sides = {"tp_size": 2}, {"page_size": 16}
    prefill, decode = (
        start(name, "llama", extra={"contract": place}, **EXACT, **side)
        for name, place, side in zip(("prefill", "decode"), places, sides)
    )
    prefill.ready()
    decode.ready()
    there, here = map(contract, places)
    assert (there.size, there.missing, there.serves) == (2, [], ("prefill",))
    assert (here.size, here.missing, here.serves) == (1, [], ("decode",))
    assert there.versions.keys() == {"kvpool", "sglang"}
    assert labels(there)["contract"] == labels(here)["contract"]
    fit = Fit(prefill=there, decode=here, names=("prefill", "decode"), tokens=100)
    assert fit.objections() == []
    answers = handed_over(prefill, decode, prompts(*LENGTHS))
    assert [one["tokens"] for one in answers] == [
        one["tokens"] for one in expected("llama", **EXACT)
    ]
