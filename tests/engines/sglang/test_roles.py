"""Engines that change their role while others serve, and engines that end in the middle of
hand-offs: every token is that of a single engine, and every page comes back.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed
from tests.engines.sglang.engines import Engine, asked, failure, handed_over
from tests.engines.sglang.servers import SglangServer
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save
from tests.ports import free_port
from tests.processes import until

ROOMY = {"max_total_tokens": 8192, **EXACT}
SWITCHES = {"enable_pd_role_switch": True, **ROOMY}


def switched(engine: Engine, role: str) -> tuple[bool, str]:
    """Whether it has changed its role, or why not."""
    engine.send(do="switch", role=role)
    answer = engine.event("switched", timeout=120)
    return answer["success"], answer["message"]


def waits(engine: Engine, count: int) -> None:
    """Until its scheduler has so many requests that wait for the other side."""
    limit = time.monotonic() + 60
    while engine.held()[0]["queued"] != count:
        if time.monotonic() > limit:
            raise EngineFailed(f"{engine.role} has not taken {count} requests.\n{engine.tail()}")
        time.sleep(0.01)


def healthz(port: int) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30)
    return answer.status_code, answer.text


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.mark.parametrize("moved_by", ["local", "nixl"])
def test_engines_change_their_role_while_others_serve(moved_by, start, expected):
    """`first` begins as prefill, `second` as decode; `third` prefills all the while."""
    port = free_port()
    extra = {"engine": moved_by, "contract": f"127.0.0.1:{port}"}
    first = start("prefill", "llama", extra=extra, **SWITCHES)
    second = start("decode", "llama", extra={"engine": moved_by}, **SWITCHES)
    third = start("prefill", "llama", extra={"engine": moved_by}, **ROOMY)
    for engine in (first, second, third):
        engine.ready()
    right = tokens_of(expected("llama", **EXACT))
    answers = []
    answers += tokens_of(handed_over(first, second, prompts(*LENGTHS)))
    # `first` may change once what it was asked for has ended, while `second` is asked by `third`
    first.idle()
    _, waiting = asked(third, second, prompts(*LENGTHS))
    assert switched(first, "decode") == (True, "ok")
    assert healthz(port) == (200, "ok\n")
    answers += tokens_of(handed_over(third, first, prompts(*LENGTHS)))
    answers += tokens_of([second.finished(name) for name in waiting])
    second.idle()
    # now `second`, while `first` is asked by `third`
    _, waiting = asked(third, first, prompts(*LENGTHS))
    assert switched(second, "prefill") == (True, "ok")
    answers += tokens_of(handed_over(second, first, prompts(*LENGTHS)))
    answers += tokens_of([first.finished(name) for name in waiting])
    # and back: decodes that knew `first` before ask its bootstrap server again
    for engine in (first, second):
        engine.idle()
    assert switched(first, "prefill") == switched(second, "decode") == (True, "ok")
    answers += tokens_of(handed_over(first, second, prompts(*LENGTHS)))
    assert len(answers) == 24 and answers == right * 6
    for engine in (first, second, third):
        engine.idle()


def test_an_engine_with_open_rooms_keeps_its_role(start, expected):
    first = start("prefill", "llama", **SWITCHES).ready()
    second = start("decode", "llama", **SWITCHES).ready()
    (prompt, *_), (right, *_) = prompts(*LENGTHS), tokens_of(expected("llama", **EXACT))
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": first.port, "bootstrap_room": 7}
    first.add(prompt, **where)
    waits(first, 1)
    done, why = switched(first, "decode")
    assert not done and "not idle" in why
    name = second.add(prompt, **where)
    assert second.finished(name)["tokens"] == right
    first.idle()
    assert switched(first, "decode") == (True, "ok")
    second.idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_sigterm_in_the_middle_of_hand_offs_ends_them_as_usual(side, start, expected):
    """What was asked of one side before SIGTERM has its tokens; then the engine ends."""
    prefill = start("prefill", "llama", **ROOMY).ready()
    decode = start("decode", "llama", **ROOMY).ready()
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port}
    ending, other = (prefill, decode) if side == "prefill" else (decode, prefill)
    rooms = [100 + number for number in range(len(LENGTHS))]
    names = {}
    for engine in (ending, other):
        names[engine.role] = [
            engine.add(prompt, bootstrap_room=room, **where)
            for prompt, room in zip(prompts(*LENGTHS), rooms)
        ]
        if engine is ending:
            waits(engine, len(LENGTHS))
            os.kill(engine.process, signal.SIGTERM)
    answers = [decode.finished(name) for name in names["decode"]]
    assert tokens_of(answers) == tokens_of(expected("llama", **EXACT))
    assert not any(map(failure, answers))
    for name in names["prefill"]:
        prefill.finished(name)
    assert ending.ended(60)
    other.idle()


class Rooms:
    """The prompts of `LENGTHS`, asked of servers over HTTP; each time in rooms of their own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads, self._last = threads, 100

    def of(self, prefill: SglangServer) -> list[dict[str, Any]]:
        """What a router adds to each of them."""
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
        self._last += len(LENGTHS)
        return [where | {"bootstrap_room": self._last - number} for number in range(len(LENGTHS))]

    def ask(self, server: SglangServer, rooms: list[dict[str, Any]]) -> list[Future[list[int]]]:
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}

        def answer(prompt: list[int], room: dict[str, Any]) -> list[int]:
            body = {"input_ids": prompt, "sampling_params": sampling} | room
            told = httpx.post(f"{server.url}/generate", json=body, timeout=120)
            assert told.is_success, told.text
            tokens: list[int] = told.json()["output_ids"]
            return tokens

        return [self._threads.submit(answer, *each) for each in zip(prompts(*LENGTHS), rooms)]

    def handed_over(self, prefill: SglangServer, decode: SglangServer) -> list[list[int]]:
        rooms = self.of(prefill)
        first, rest = self.ask(prefill, rooms), self.ask(decode, rooms)
        assert all(one.result() for one in first)
        return [one.result() for one in rest]


def turn(server: SglangServer, role: str) -> tuple[int, bool, str]:
    body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
    answer = httpx.post(f"{server.url}/pd_role_switch", json=body, timeout=120)
    told = answer.json()
    return answer.status_code, told["success"], told["message"]


@pytest.mark.timeout(600)
def test_servers_change_their_role_and_end_over_http(models, tmp_path, expected):
    """`POST /pd_role_switch`, refused while a request is open; then SIGTERM to a prefill that
    nobody has read from yet.
    """
    model, right = save("llama", models), tokens_of(expected("llama", **EXACT))
    with (
        ThreadPoolExecutor(2 * len(LENGTHS)) as threads,
        SglangServer("prefill", model, tmp_path, **SWITCHES) as first,
        SglangServer("decode", model, tmp_path, **SWITCHES) as second,
    ):
        for server in (first, second):
            server.ready()
        rooms = Rooms(threads)
        assert rooms.handed_over(first, second) == right
        opened = rooms.of(first)
        prefilled = rooms.ask(first, opened)
        until(lambda: first.held()["queued"] == len(LENGTHS))
        status, done, why = turn(first, "decode")
        assert (status, done) == (400, False) and "not idle" in why
        assert [one.result() for one in rooms.ask(second, opened)] == right
        assert all(one.result() for one in prefilled)
        for server, role in ((first, "decode"), (second, "prefill")):
            server.idle()
            assert turn(server, role) == (200, True, "ok")
        assert rooms.handed_over(second, first) == right
        opened = rooms.of(second)
        prefilled = rooms.ask(second, opened)
        until(lambda: second.held()["queued"] == len(LENGTHS))
        second.terminate()
        assert [one.result() for one in rooms.ask(first, opened)] == right
        assert all(one.result() for one in prefilled)
        until(second.ended, 90)
        first.idle()
        first.terminate()
        until(first.ended, 90)
