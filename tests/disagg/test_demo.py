"""The demo is the claim: three families, two engines, two processes, equal to one process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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


def test_a_hand_off_that_fails_is_exit_status_1_and_says_why(monkeypatch, capsys):
    """Prefill is told of a longer prompt than decode made room for."""
    from rich.console import Console
    from typer import Exit

    genuine = demo.multiprocessing.get_context("spawn").Process

    def longer(target, args, daemon):
        return genuine(target=target, args=(args[0], replace(args[1], prompt_tokens=41)))

    context = type("Context", (), {"Process": staticmethod(longer)})
    context.Pipe = staticmethod(demo.multiprocessing.get_context("spawn").Pipe)
    monkeypatch.setattr(demo.multiprocessing, "get_context", lambda _: context)
    with pytest.raises(RuntimeError, match="41 tokens, decode made room for 40"):
        demo.run(SMALL, 2, Console())
    monkeypatch.setattr(demo, "run", lambda *_: False)
    with pytest.raises(Exit) as ended:
        demo.demo(prompt_tokens=40)
    assert ended.value.exit_code == 1


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["explain", "--help"]])
def test_help_is_there(arguments):
    done = kvpool(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_bad_options_are_refused_by_a_sentence():
    done = kvpool("demo", "--dtype", "int8")
    assert done.returncode == 2
    assert "float32, bfloat16 or float16, got 'int8'" in done.stderr
