"""Faults with real engine processes: kills, aborts, leases that run out. Every request ends by
name, and by SGLang's own count everything comes back on the engines that live.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engines.pair import LENGTHS
from tests.engines.sglang.engines import Engine, asked, failure, handed_over
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save
from tests.processes import until

LONG = (2000, 1900, 16, 1800)
ROOMY = {"max_total_tokens": 8192, "chunked_prefill_size": 512}


@pytest.mark.parametrize("moved_by", ["local", "nixl", "mooncake"])
def test_a_killed_prefill_fails_its_requests_and_another_takes_its_place(moved_by, start, expected):
    extra = {"engine": moved_by, "peer_timeout": 10}
    prefill = start("prefill", "llama", extra=extra, **ROOMY).ready()
    decode = start("decode", "llama", extra=extra, **ROOMY).ready()
    _, last = asked(prefill, decode, prompts(*LONG))
    time.sleep(0.3)
    prefill.kill()
    assert any("lost" in why for why in [failure(decode.finished(name)) for name in last])
    decode.idle()
    again = start("prefill", "llama", extra=extra, port=prefill.port, **ROOMY).ready()
    right = [one["tokens"] for one in expected("llama")]
    assert [one["tokens"] for one in handed_over(again, decode, prompts(*LENGTHS))] == right
    again.kill()  # while nothing is asked of it
    third = start("prefill", "llama", extra=extra, port=prefill.port, **ROOMY).ready()
    assert [one["tokens"] for one in handed_over(third, decode, prompts(*LENGTHS))] == right
    third.idle()
    decode.idle()


def test_a_killed_decode_frees_prefill(start, expected):
    prefill = start("prefill", "llama", **ROOMY).ready()
    decode, other = (start("decode", "llama", **ROOMY).ready() for _ in range(2))
    first, _ = asked(prefill, decode, prompts(*LONG))
    time.sleep(1.0)  # it has asked for both: else prefill waits for it as long as SGLang says
    decode.kill()
    for name in first:
        prefill.finished(name)
    prefill.idle()
    got = handed_over(prefill, other, prompts(*LENGTHS))
    assert [one["tokens"] for one in got] == [one["tokens"] for one in expected("llama")]
    prefill.idle()


def test_aborts_and_a_killed_decode_free_every_stage(start, expected):
    """SGLang tells the later stages of prefill what has become of a request by the first one."""
    prefill = start("prefill", "llama", pp_size=2, **ROOMY).ready()
    decode, other = (start("decode", "llama", **ROOMY).ready() for _ in range(2))
    first, last = asked(prefill, decode, prompts(*LONG), tokens=4)
    prefill.send(do="abort", id=first[0])
    until(
        decode.busy
    )  # before it has asked it has nobody to tell, and prefill waits for its time-out
    decode.send(do="abort", id=last[1])
    for engine, names in ((prefill, first), (decode, last)):
        for name in names:
            engine.finished(name)
        engine.idle()
    first, _ = asked(prefill, decode, prompts(*LONG))
    time.sleep(1.0)  # it has asked for both
    decode.kill()
    for name in first:
        prefill.finished(name)
    prefill.idle()
    got = handed_over(prefill, other, prompts(*LENGTHS))
    assert [one["tokens"] for one in got] == [one["tokens"] for one in expected("llama")]
    prefill.idle()


@pytest.mark.parametrize("wait", [0.0, 0.3])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_aborts_free_both_sides(side, wait, pair):
    """One side is told by its client, the other by us."""
    prefill, decode = pair
    first, last = asked(prefill, decode, prompts(*LONG), tokens=4)
    time.sleep(wait)
    for engine, names in ((prefill, first), (decode, last)):
        if side in (engine.role, "both"):
            for name in names[::2]:
                engine.send(do="abort", id=name)
    for engine, names in ((prefill, first), (decode, last)):
        for name in names:
            engine.finished(name)
        engine.idle()


def test_a_request_that_only_one_side_has_ends_in_time(pair):
    """`pair` waits two seconds for the other side, as SGLang's own timeouts say."""
    prefill, decode = pair
    (prompt,) = prompts(40)
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port}
    alone = prefill.add(prompt, bootstrap_room=1, **where)
    other = decode.add(prompt, bootstrap_room=2, **where)
    assert "Bootstrapping" in failure(prefill.finished(alone))
    assert "nothing has happened" in failure(decode.finished(other))
    prefill.idle()
    decode.idle()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any, models: Any) -> Any:
    """Engines for all aborts."""
    names = ("BOOTSTRAP_TIMEOUT", "WAITING_TIMEOUT")
    waits = {f"SGLANG_DISAGGREGATION_{name}": "6" for name in names}
    logs, place = tmp_path_factory.mktemp("pair"), save("llama", models)
    both = [Engine(r, place, logs, environ=waits, **ROOMY) for r in ("prefill", "decode")]
    yield tuple(engine.ready() for engine in both)
    for engine in both:
        engine.close()
