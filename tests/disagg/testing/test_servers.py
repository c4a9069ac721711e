"""Servers end with all their children; what they answer and log becomes a reason."""

from __future__ import annotations

import os
import re
import sys
import time

import pytest

from disagg.testing import reasons
from disagg.testing.launch import Launch, save_plugins
from disagg.testing.servers import EngineServer, RequestFailed, ServerEnded, free_ports
from disagg.testing.suite import EngineSpec, ServerSettings

PROGRAM = """
import http.server, json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"asked": asked, "id": self.headers["X-Request-Id"]}).encode()
        self.send_response(500 if asked.get("fail") else 200)
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serve(folder, program=PROGRAM, name="vllm prefill"):
    port = free_ports(2)
    command = [sys.executable, "-c", program, str(port)]
    return EngineServer(name, command, env=dict(os.environ), port=port, log=folder / "logs" / "log")


def test_a_server_is_asked_and_ends_with_its_children(tmp_path):
    with serve(tmp_path) as server:
        server.ready(30)
        answer = server.ask("/x", {"a": 1}, headers={"X-Request-Id": "r"}, timeout=10)
        assert answer == {"asked": {"a": 1}, "id": "r"}
        with pytest.raises(RequestFailed, match=r"vllm prefill: HTTP 500: .*fail"):
            server.ask("/x", {"fail": 1}, timeout=10)
        child = int(server.text().split("child ")[-1].split()[0])
        os.kill(child, 0)
    assert ended(child)


def ended(process):
    """Whether a process goes within 10 s. One that nobody waits for is a zombie."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_ends_is_noticed_while_another_starts(tmp_path):
    with (
        serve(tmp_path / "1", "raise ValueError('no such speed')") as lost,
        serve(tmp_path / "2", "import time; time.sleep(60)", name="vllm decode") as other,
    ):
        with pytest.raises(ServerEnded, match="vllm prefill has ended with status 1") as caught:
            other.ready(30, beside=[lost, other])
        assert caught.value.server is lost and not caught.value.signalled
        assert reasons.of_start(lost.text()) == "ValueError: no such speed"
        with pytest.raises(TimeoutError, match="vllm decode does not serve for 0 s"):
            other.ready(0.1)
        with pytest.raises(RequestFailed, match="vllm decode: "):
            other.ask("/x", {}, timeout=5)


VLLM = """\
(EngineCore pid=7) ERROR 11-28 09:45:33 [core.py:12] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-28 09:45:33 [core.py:12]   File "a.py", line 3, in register
(EngineCore pid=7) ERROR 11-28 09:45:33 [core.py:12] disagg.errors.IncompatibleLayouts: 2 reasons.
(EngineCore pid=7) ERROR 11-28 09:45:33 [core.py:12]   target layer 0 k: float32 on prefill.
(EngineCore pid=7) ERROR 11-28 09:45:33 [core.py:12]   target layer 1 k: float32 on prefill.
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""
SGLANG = """\
[2026-11-28 09:39:45] Scheduler hit an exception: Traceback (most recent call last):
  File "conn.py", line 545, in __init__
    raise ImportError(
ImportError: Please install NIXL

[2026-11-28 09:39:45] Received sigquit from a child process. It usually means the child failed.
"""
LOGGED = """\
(Worker pid=9) WARNING 11-28 09:45:30 [vllm.py:725] Model Runner V2 requires Triton
(Worker pid=9) ERROR 11-28 09:46:24 [base_worker.py:1318] handshake failed: blocks differ
(Worker pid=9) ERROR 11-28 09:46:24 [base_worker.py:1318] handshake failed: blocks differ
"""
REFUSED = """\
(Worker pid=9) ERROR 11-28 10:35:38 [rank.py:316] request cmpl-conform-0-0-b34a was not received: 2.
(Worker pid=9) ERROR 11-28 10:35:38 [rank.py:316]   target layers 0-3 k: float32 on prefill.
(APIServer pid=3) ERROR 11-28 10:35:38 [a.py:203] Request conform-0 failed with an internal error
"""
LIBRARIES = """\
\x1b[31;20m[2026-11-28 10:02:50,087] LMCache ERROR:\x1b[0m Timeout occurred for rank 0
2026-11-28 09:41:17 NIXL ERROR   _api.py:405 no backend
"""


def test_a_reason_is_the_connectors_own():
    assert reasons.of_start(VLLM) == (
        "IncompatibleLayouts: 2 reasons.\n"
        "  target layer 0 k: float32 on prefill.\n"
        "  target layer 1 k: float32 on prefill."
    )
    assert reasons.of_start(SGLANG) == "ImportError: Please install NIXL"
    assert reasons.of_start("Killed\n\n") == "Killed"
    assert reasons.of_requests(["", VLLM], ["HTTP 500"]).startswith("IncompatibleLayouts")
    assert reasons.of_requests([LOGGED], ["HTTP 500"]) == "handshake failed: blocks differ"
    log = REFUSED + REFUSED.replace("conform-0-0-b34a", "conform-1-0-9c")
    assert reasons.of_requests(["", log], ["HTTP 500"]) == (
        "request conform was not received: 2.\n  target layers 0-3 k: float32 on prefill."
    )
    text = reasons.of_requests([LIBRARIES], [])
    assert text == "Timeout occurred for rank 0"
    text = reasons.of_requests([LIBRARIES.splitlines()[1]], [])
    assert text == "_api.py:405 no backend"
    assert reasons.of_requests(["", ""], ["HTTP 500", "HTTP 500"]) == "HTTP 500"


def launch(folder, engine, role, args, **more):
    spec = EngineSpec(name=engine, python="/py", pythonpath="/lib", env={"A": "1"})
    usual = {"engine": engine, "block_size": 16, "tp": 2, "pp": 1, "dtype": "float32"}
    side = ServerSettings(**usual, draft=None, method=more.pop("method", None), args=args)
    common = {"model": folder / "m", "draft": None, "port": 7, "plugins": folder / "plugins"}
    return Launch(role=role, spec=spec, side=side, **common, **more)


def test_a_sides_arguments_are_added_to_the_connectors(tmp_path):
    args = {
        "kv_transfer_config": {"kv_role": "kv_both"},
        "max-model-len": 512,
        "enforce_eager": False,
    }
    config = {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_producer"}}
    words = launch(tmp_path, "vllm", "prefill", args, connector=config, env={"B": "2"}).command()
    assert words[:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
    text = " ".join(words)
    assert '--kv-transfer-config {"kv_connector": "X", "kv_role": "kv_both"}' in text
    assert "--max-model-len 512" in text and "--no-enforce-eager" in text
    assert "--tensor-parallel-size 2" in text and "--block-size 16" in text
    alone = " ".join(launch(tmp_path, "vllm", "single", args).command())
    assert "kv-transfer-config" not in alone and "--max-model-len 512" in alone
    made = launch(tmp_path, "sglang", "decode", {"disable_radix_cache": False}, method="eagle")
    text = " ".join(made.command())
    assert "--page-size 16" in text and "--speculative-algorithm EAGLE" in text
    assert "radix" not in text


def test_engines_find_what_reads_their_state(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "kvpool")
    made = launch(tmp_path, "vllm", "decode", {}, watch=tmp_path / "watch", env={"B": "2"})
    env = made.environment()
    assert env["PYTHONPATH"] == f"{tmp_path / 'plugins'}{os.pathsep}/lib"
    assert (env["A"], env["B"], env["KVPOOL_CONFORM_SIDE"]) == ("1", "2", "decode")
    assert "VLLM_PLUGINS" not in env
    folder = save_plugins(tmp_path / "plugins")
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        text = (folder / f"kvpool_conform_{name}-0.dist-info" / "entry_points.txt").read_text()
        assert text == f"[{group}]\nkvpool_conform_{name} = kvpool_conform_{name}:register\n"
        source = (folder / f"kvpool_conform_{name}.py").read_text()
        assert not re.search(r"^\s*(from|import) (disagg|kvpool)", source, re.MULTILINE)
