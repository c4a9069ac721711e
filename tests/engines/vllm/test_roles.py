"""Engines that serve both sides and change them under load, and a prefill that ends in the middle
of hand-offs: every token is that of a single engine, and every block comes back.
"""

from __future__ import annotations

import subprocess
import time

import httpx
import pytest

from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed
from tests.engines.servers import tokens
from tests.engines.vllm.engines import PREFILL, prefilled, prompts
from tests.engines.vllm.models import save
from tests.engines.vllm.servers import api_server
from tests.ports import free_port

ROUNDS = 6


@pytest.mark.parametrize("moved_by", ["local", "nixl"])
def test_engines_change_sides_while_they_serve_the_other(moved_by, start, expected):
    """In each round one prefills for the other, which still decodes what the round before gave."""
    right = expected("llama", **EXACT)
    extra = {"engine": moved_by, "verify": "checksum"}
    pair = [start("store", "llama", extra=extra, policy="fail", **EXACT) for _ in range(2)]
    for engine in pair:
        engine.ready()
    asked, names = prompts(*LENGTHS), []
    for number in range(ROUNDS):
        source, dest = pair[number % 2], pair[1 - number % 2]
        params = prefilled(source, asked)
        names += [(dest, dest.add(prompt, params=one)) for prompt, one in zip(asked, params)]
    answers = [engine.finished(name) for engine, name in names]
    assert [answer["reason"] for answer in answers] == [["length"]] * (ROUNDS * len(asked))
    assert [answer["tokens"][0] for answer in answers] == right * ROUNDS
    for engine in pair:
        engine.idle()


def draining(port: int, server: object) -> None:
    """Waits until the engine says that it drains."""
    until = time.monotonic() + 60
    while (answer := httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30)).status_code != 503:
        if time.monotonic() > until:
            raise EngineFailed(f"it does not drain: {answer.text}\n{server.tail()}")
        time.sleep(0.05)
    assert answer.text == "draining\n"


@pytest.mark.timeout(900)
def test_a_prefill_that_gets_sigterm_is_read_to_the_end(models, tmp_path, expected):
    """What it has computed is asked for after SIGTERM; then it ends, within its time-out."""
    model, asked, port = save("llama", models), prompts(*LENGTHS), free_port()
    extra = {"contract": f"127.0.0.1:{port}"}
    with (
        api_server(
            "prefill", model, tmp_path, extra=extra, shutdown_timeout=120, **EXACT
        ) as prefill,
        api_server("decode", model, tmp_path, **EXACT) as decode,
    ):
        for server in (prefill, decode):
            server.ready(600)
        name = {"model": "llama"}
        params = [
            prefill.ask(prompt=prompt, max_tokens=1, kv_transfer_params=dict(PREFILL), **name)
            for prompt in asked
        ]
        prefill.process.terminate()
        draining(port, prefill)
        with pytest.raises(subprocess.TimeoutExpired):
            prefill.process.wait(0)
        answers = [
            decode.ask(prompt=prompt, kv_transfer_params=one["kv_transfer_params"], **name)
            for prompt, one in zip(asked, params)
        ]
        assert [tokens(answer) for answer in answers] == expected("llama", **EXACT)
        assert decode.metric("kvpool_rooms_total", endpoint="decode", outcome="success") == len(
            asked
        )
        prefill.process.wait(120)
        assert "force killing" not in prefill.tail()
        decode.idle()
