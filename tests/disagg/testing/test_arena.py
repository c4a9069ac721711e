"""What an arena notes of servers that refuse, fail, end, compute by themselves or damage.

The servers are a program of a few lines in place of vLLM's; `tests/engines` has the real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagg.testing.arena import Arena
from disagg.testing.suite import EngineSpec, Pair, ServerSettings, Suite

ROOT = Path(__file__).parents[3]
ENGINE = """
import argparse, http.server, json, os, pathlib, sys
import numpy as np

parser = argparse.ArgumentParser()
for name in ("port", "behave", "kv-transfer-config"):
    parser.add_argument(f"--{name}", default="")
given, _ = parser.parse_known_args()
behave, side = given.behave, os.environ["KVPOOL_CONFORM_SIDE"]
folder = pathlib.Path(os.environ["KVPOOL_CONFORM"])
if behave == "refuse" and given.kv_transfer_config or behave == "cannot":
    raise ValueError(f"{side}: no such speed")
if side != "single":
    (folder / f"{side}.watched").touch()


def save(name, tokens):
    if side == "single" or behave == "itself" and side == "decode":
        return
    rows = np.arange(len(tokens) * 4, dtype=np.uint8).reshape(len(tokens), 2, 2)
    rows[-1, 1, 1] += behave == "damage" and side == "decode"
    part = {"owner": "target", "layer": 0, "part": "k", "join": "heads", "start": 0}
    told = {"tokens": len(tokens), "parts": {"target 0 k": part | {"dtype": "uint8"}}}
    told["unread"] = ["target 1: a form"] if behave == "unread" else []
    told = np.frombuffer(json.dumps(told).encode(), np.uint8)
    path = folder / f"{side}.{name}.0.0.{len(tokens)}.rows.npz"
    np.savez(path, told=told, **{"target 0 k": rows})


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["prompt"]
        if behave == "die" and len(prompt) == 9 and side == "decode":
            print("RuntimeError: out of blocks", flush=True)
            os._exit(3)
        if behave == "fail" or behave == "some" and len(prompt) == 9 and side == "decode":
            print("(Worker pid=1) ERROR 11-28 09:00:00 [w.py:1] blocks differ", flush=True)
            return self.answer(500, {"error": "internal"})
        save(self.headers["X-Request-Id"], prompt)
        tokens = [(sum(prompt) + n) % 97 for n in range(asked["max_tokens"])]
        choice = {"finish_reason": "length", "token_ids": tokens}
        self.answer(200, {"choices": [choice], "kv_transfer_params": {"room": 1}})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


http.server.HTTPServer(("127.0.0.1", int(given.port)), Handler).serve_forever()
"""


@pytest.fixture
def suite(tmp_path):
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(ENGINE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 512}')
    path = os.pathsep.join(map(str, (tmp_path / "site", ROOT)))
    spec = EngineSpec(name="vllm", python=sys.executable, pythonpath=path, env={})
    return Suite(engines={"vllm": spec}, models={"m": str(tmp_path / "model")}, pairs=())


def pair(prefill="", decode="", connector="kvpool", model="m"):
    sides = [
        ServerSettings(
            engine="vllm",
            block_size=16,
            tp=1,
            pp=1,
            dtype="float32",
            draft=None,
            method=None,
            args={"behave": behave} if behave else {},
        )
        for behave in (prefill, decode)
    ]
    return Pair(
        name="row",
        connector=connector,
        model=model,
        prefill=sides[0],
        decode=sides[1],
        transport="local",
        settings={},
        prompts=(20, 9),
        new_tokens=4,
    )


@pytest.fixture
def observe(suite, tmp_path):
    told = []
    with Arena(suite, tmp_path / "arena", told.append) as arena:
        yield arena.observe
    assert "row: starts" in told or not [line for line in told if "packages" not in line]


def test_a_pair_that_serves_has_tokens_bytes_and_versions(observe):
    shown = observe(pair())
    assert shown.tokens == shown.alone_prefill == shown.alone_decode
    assert [len(tokens) for tokens in shown.tokens] == [4, 4]
    assert (shown.differences, shown.errors, shown.lost, shown.refused) == ("", (), None, None)
    assert shown.versions["vllm: kvpool"]


def test_single_engines_are_asked_once_for_a_folder(suite, tmp_path):
    for number in range(2):
        told = []
        with Arena(suite, tmp_path / "arena", told.append) as arena:
            shown = arena.observe(pair())
        assert shown.tokens == shown.alone_prefill == shown.alone_decode
        assert told.count("row: vllm alone") == 1 - number


def test_the_first_byte_that_decode_has_otherwise_is_named(observe):
    shown = observe(pair(decode="damage"))
    assert shown.differences == (
        "target 0 k, token 19, head 1, byte 1: 0x4f on prefill, 0x50 on decode"
    )


def test_bytes_that_are_read_in_part_are_not_called_equal(observe):
    assert observe(pair(decode="unread")).differences is None


def test_a_connector_that_does_not_start_refuses(observe):
    shown = observe(pair(prefill="refuse"))
    assert shown.refused == "vllm prefill does not start: ValueError: prefill: no such speed"
    assert shown.tokens is None and shown.here is None


def test_an_engine_that_does_not_start_without_it_cannot_run_here(observe):
    shown = observe(pair(decode="cannot"))
    assert shown.refused is None
    assert shown.here.startswith("vllm alone: vllm single has ended with status 1. ValueError: ")


def test_a_pair_whose_every_request_fails_refuses_with_the_logs_reason(observe):
    assert observe(pair(decode="fail")).refused == "blocks differ"


def test_a_request_that_fails_beside_others_is_an_error(observe):
    shown = observe(pair(decode="some"))
    (error,) = shown.errors
    assert error.startswith("prompt of 9 tokens: vllm decode: HTTP 500: ")
    assert "blocks differ" in error and shown.tokens[1] == () and shown.differences == ""


def test_an_engine_that_ends_is_lost_with_its_last_words(observe):
    shown = observe(pair(decode="die"))
    assert shown.lost == "vllm decode has ended with status 3.\nRuntimeError: out of blocks"


def test_a_decode_that_computes_all_by_itself_has_refused(observe):
    shown = observe(pair(decode="itself"))
    assert shown.refused.startswith("decode computed all prompts by itself: ")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (pair(connector="lmcache"), "lmcache.integration.vllm.vllm_v1_adapter: ModuleNotFound"),
        (pair(model="nowhere"), "model nowhere: there is no nowhere/config.json"),
    ],
)
def test_what_is_not_installed_cannot_run_here(observe, row, words):
    shown = observe(row)
    assert words in shown.here and shown.tokens is None


PROGRAM = """
import sys
from pathlib import Path
from disagg.testing.arena import Arena
from tests.disagg.testing.test_arena import pair
from disagg.testing.suite import EngineSpec, Suite

spec = EngineSpec(name="vllm", python=sys.executable, pythonpath=sys.argv[1], env={})
suite = Suite(engines={"vllm": spec}, models={"m": sys.argv[2]}, pairs=())
with Arena(suite, Path(sys.argv[3]), lambda line: print(line, flush=True)) as arena:
    arena.observe(pair("sleep"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_servers_end_with_the_program(suite, tmp_path, number):
    spec = suite.engines["vllm"]
    server = Path(spec.pythonpath.split(os.pathsep)[0], "vllm/entrypoints/openai/api_server.py")
    server.write_text("import time; time.sleep(600)")
    command = [sys.executable, "-c", PROGRAM, spec.pythonpath, suite.models["m"]]
    program = subprocess.Popen(
        [*command, str(tmp_path / "arena")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with program:
        while program.stdout.readline() != "row: starts\n":
            assert program.poll() is None
        while len(started := servers(tmp_path)) < 2:
            time.sleep(0.05)
        program.send_signal(number)
        assert program.wait(30)
    assert len(started) == 2 and not servers(tmp_path)


def servers(folder):
    """Processes of servers whose logs are in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            path = os.readlink(process / "fd/1")
        except OSError:
            continue
        if path.startswith(str(folder / "arena" / "logs")):
            found.append(process.name)
    return found
