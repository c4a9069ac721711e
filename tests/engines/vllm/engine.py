"""One real vLLM engine in a process of its own, driven by lines of JSON over a socket.

`python -m tests.engines.vllm.engine FD` imports vLLM once, and forks an engine for each line
(`tests.engines.launcher`). Commands: `add` (a request), `abort`, `blocks` (blocks in use,
requests), `busy` (seconds without a step), `close`. It steps while there is anything to do, as
vLLM's own loop does. Each line that comes back is an event.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from multiprocessing.connection import wait
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# more would wait for one another, two engines on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import SamplingParams
from vllm.distributed.device_communicators import shm_broadcast
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engines.launcher import serve
from tests.engines.vllm import deepseek_v4, pictures

# Linux 6.18 runs nothing else for a minute on cores that several processes spin on with sched_yield
shm_broadcast.sched_yield = lambda: time.sleep(0.0001)


class Served:
    """The engine and its socket."""

    def __init__(self, line: socket.socket, arguments: dict[str, Any]) -> None:
        self.line, self.left = line, b""
        began = time.monotonic()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.budget = self.scheduler.max_num_scheduled_tokens
        self.added: dict[str, float] = {}
        self.outputs: dict[str, dict[int, tuple[list[int], str | None]]] = {}
        self.drafted: dict[str, list[tuple[list[int], int]]] = {}
        """By request, each step's drafts and how many were accepted."""
        if arguments.get("speculative_config"):
            self.watch_drafts()
        self.computed: Counter[str] = Counter()
        """By request, tokens that were scheduled: what a cache or a connector gave is not."""
        self.count_scheduled()
        self.reply(event="ready", seconds=time.monotonic() - began)

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def count_scheduled(self) -> None:
        """Counts what each step computes."""
        schedule = self.scheduler.schedule

        def counted(*given: Any) -> Any:
            output = schedule(*given)
            for name, tokens in output.num_scheduled_tokens.items():
                self.computed[name.rpartition("-")[0]] += tokens
            return output

        self.scheduler.schedule = counted

    def watch_drafts(self) -> None:
        """Notes what the drafter has proposed."""
        update = self.scheduler.update_from_output

        def noted(scheduled: Any, output: Any) -> Any:
            for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
                if drafts[0] < 0:  # filled in: decode has none in its first step
                    continue
                sampled = output.sampled_token_ids[output.req_id_to_index[name]]
                asked = name.rpartition("-")[0]
                self.drafted.setdefault(asked, []).append(([*drafts], len(sampled) - 1))
            return update(scheduled, output)

        self.scheduler.update_from_output = noted

    def reply(self, **event: Any) -> None:
        self.line.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        while True:
            work = self.scheduler.has_requests()
            if wait([self.line], 0.0 if work else 0.05):
                data = self.line.recv(1 << 20)
                if not data:
                    return
                *lines, self.left = (self.left + data).split(b"\n")
                for text in lines:
                    if not self.do(json.loads(text)):
                        return
            if work:
                self.step()

    def step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            held = self.outputs.setdefault(name, {})
            for one in output.outputs:
                held[one.index] = list(one.token_ids), one.finish_reason
                if one.token_ids and name in self.added:
                    self.reply(
                        event="first", id=name, seconds=time.monotonic() - self.added.pop(name)
                    )
            if output.finished:
                each = [one for _, one in sorted(self.outputs.pop(name).items())]
                self.reply(
                    event="finished",
                    id=name,
                    tokens=[tokens for tokens, _ in each],
                    reason=[reason for _, reason in each],
                    params=output.kv_transfer_params,
                    cached=output.num_cached_tokens,
                    computed=self.computed.pop(name, 0),
                    drafts=self.drafted.pop(name, []),
                )
        if not self.scheduler.running:
            time.sleep(0.001)  # as vLLM's loop does where only a connector has work

    def do(self, command: dict[str, Any]) -> bool:
        """One command; False ends the process."""
        match command.pop("do"):
            case "add":
                extra = {"kv_transfer_params": command["params"]} if command.get("params") else None
                sampling = SamplingParams(
                    temperature=0 if command.get("n", 1) == 1 else 1,
                    top_k=1,  # greedy too: vLLM has no several sequences at temperature 0
                    max_tokens=command.get("tokens", 24),
                    ignore_eos=True,
                    n=command.get("n", 1),
                    extra_args=extra,
                )
                # prefilled in two steps, the last token alone, as where another engine takes over
                split = len(command["prompt"]) - 1 if command.get("split") else 0
                self.scheduler.max_num_scheduled_tokens = split or self.budget
                prompt = TokensPrompt(prompt_token_ids=command["prompt"])
                if command.get("salt"):
                    prompt["cache_salt"] = command["salt"]
                if command.get("pictures"):
                    shown = [pictures.picture(seed) for seed in command["pictures"]]
                    prompt["multi_modal_data"] = {"image": shown}
                if command.get("names"):
                    prompt["multi_modal_uuids"] = {"image": command["names"]}
                self.added[command["id"]] = time.monotonic()
                self.engine.add_request(
                    command["id"], prompt, sampling, trace_headers=command.get("headers")
                )
            case "abort":
                self.engine.abort_request([command["id"]])
            case "blocks":
                pool = self.scheduler.kv_cache_manager.block_pool
                self.reply(
                    event="blocks",
                    free=pool.get_num_free_blocks(),
                    total=pool.num_gpu_blocks,
                    requests=len(self.scheduler.requests),
                )
            case "busy":
                time.sleep(command["seconds"])
            case "close":
                self.engine.engine_core.shutdown()
                return False
        return True


def run(line: socket.socket, arguments: dict[str, Any]) -> None:
    """One engine, until its socket ends."""
    if arguments["model"].endswith("deepseek_v4"):
        deepseek_v4.enable()
    Served(line, arguments).serve()


if __name__ == "__main__":
    serve(int(sys.argv[1]), run)
