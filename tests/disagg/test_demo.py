"""The demo is the claim: three families, two engines, two processes, equal to one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer import Exit

from disagg import demo
from disagg.demo import MODELS, Settings
from kvpool.allocator import Allocator
from kvpool.integrations.transformers import PoolCache
from tests.disagg.peers import ENGINES

KVPOOL = Path(sys.executable).with_name("kvpool")
SMALL = Settings("llama", "local", 40, 16, "float32", 0, 1, 8, 8)


def kvpool(*arguments):
    return subprocess.run(
        [KVPOOL, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_decode_elsewhere_equals_one_process(model, engine):
    done = kvpool(
        "demo", "--model", model, "--engine", engine, "--prompt-tokens", 150, "--new-tokens", 8,
        "--chunk-tokens", 64, "--prefill-page", 16, "--decode-page", 24, "--dtype", "bfloat16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits of 8 of 8 decoded steps bit-equal" in done.stdout
    assert "PASS" in done.stdout and "FAIL" not in done.stdout


@pytest.fixture(scope="module")
def single():
    """A model, its pool and transformers' own cache after the same prompt."""
    model, prompt = SMALL.build()
    pool = SMALL.pool(model, SMALL.decode_page, 40)
    allocator = Allocator(pool)
    cache, own = PoolCache.new(pool, allocator), demo.transformers_cache(model)
    with torch.no_grad():
        for each in (cache, own):
            demo.prefill(model, prompt, each, SMALL.chunks())
    return pool, allocator.locations(cache.requests[0])["kv"], own


def test_the_byte_verdict_counts_every_live_byte(single):
    pool, locations, own = single
    assert demo.compare_bytes(pool, locations, own) == (0, 40 * pool.bytes_per_token)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("token", [0, 39])
def test_the_byte_verdict_sees_one_wrong_byte(single, role, token):
    pool, locations, own = single
    page, step = divmod(int(locations[token]), pool.page_size)
    cell = pool.view(role, 5).view(torch.uint8)[page, step, 1, 7:8]
    cell ^= 1
    wrong, _ = demo.compare_bytes(pool, locations, own)
    cell ^= 1
    assert wrong == 1


def mislead(pipe, settings):
    """A prefill that computes one token more than decode made room for."""
    demo.prefill_process(pipe, replace(settings, prompt_tokens=settings.prompt_tokens + 1))


def vanish(pipe, settings):
    """A prefill that ends before it has said where it is."""
    os._exit(3)


def vanish_later(pipe, settings):
    """A prefill that ends once it has said where it is, without an endpoint there."""
    pipe.send(("address", "tcp://127.0.0.1:9"))
    os._exit(4)


def stop_listening(pipe, settings):
    """A prefill that shakes hands, cannot be told to go, and ends a little later."""

    def close():
        pipe.close()
        time.sleep(0.5)
        os._exit(5)

    pipe.recv = close
    demo.offer(pipe, settings)


@pytest.mark.parametrize(
    ("instead", "sentence"),
    [
        (mislead, "41 tokens, decode made room for 40"),
        (vanish, "prefill ended with status 3"),
        (vanish_later, "prefill ended with status 4"),
        (stop_listening, "prefill ended with status 5"),
    ],
)
def test_a_hand_off_that_fails_is_exit_status_1_and_says_why(
    monkeypatch, capsys, instead, sentence
):
    monkeypatch.setattr(demo, "prefill_process", instead)
    with pytest.raises(Exit) as ended:
        demo.demo(prompt_tokens=40, prefill_page=8, decode_page=8)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and sentence in said


def test_a_reason_with_brackets_is_printed_as_it_is(monkeypatch, capsys):
    monkeypatch.setattr(demo, "engine_class", lambda _: type("E", (), {"availability": missing}))
    with pytest.raises(Exit):
        demo.demo()
    assert "not there. Install kvpool[nixl]." in capsys.readouterr().out


def missing():
    return "not there. Install kvpool[nixl]."


def prefill_of(parent: int) -> int:
    """The process that `parent` spawned, once it is there."""
    for _ in range(200):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                status = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == parent and b"--multiprocessing-fork" in line:
                    return int(entry)
        time.sleep(0.1)
    raise AssertionError("the demo has spawned no process")


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM])
def test_the_prefill_process_ends_with_its_parent(ended):
    running = subprocess.Popen([KVPOOL, "demo"], stdout=subprocess.DEVNULL)
    child = prefill_of(running.pid)
    time.sleep(1)
    running.send_signal(ended)
    running.wait(20)
    for _ in range(100):
        try:
            if " Z " in Path(f"/proc/{child}/stat").read_text():
                return
        except OSError:  # gone, perhaps while it was being read
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the prefill process has outlived its parent by ten seconds")


def test_a_prefill_process_that_is_killed_is_exit_status_1():
    running = subprocess.Popen([KVPOOL, "demo"], stdout=subprocess.PIPE, text=True)
    child = prefill_of(running.pid)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "FAIL prefill ended with status -9" in said


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["explain", "--help"]])
def test_help_is_there(arguments):
    done = kvpool(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--dtype", "int8", "one of float32, bfloat16, float16, got 'int8'"),
        ("--engine", "pigeon", "one of local, nixl, got 'pigeon'"),
        ("--model", "gpt", "one of llama, qwen3_moe, deepseek_v3, got 'gpt'"),
    ],
)
def test_bad_options_are_refused_by_a_sentence(option, value, sentence):
    done = kvpool("demo", option, value)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.replace("│", "").split())
