"""Real SGLang engines in processes of their own, each driven by lines of JSON over a socket.

`python -m tests.engines.sglang.engine FD` imports SGLang once, and forks an engine for each line
that it reads: `{"environ": ..., "log": ..., "arguments": ...}`, with the engine's socket beside it.
The engine's own processes are forked too. An engine's commands: `add` (a request), `abort`,
`switch` (to another role), `counts` (what the scheduler of each rank holds), `close`. Each line
that comes back is an event.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engines.launcher import serve


class Served:
    """The engine and its socket."""

    def __init__(self, line: socket.socket, arguments: dict[str, Any]) -> None:
        import sglang

        began = time.monotonic()
        self.line, self.tasks = line, set[asyncio.Task[None]]()
        self.engine = sglang.Engine(**arguments)
        self.reply(event="ready", seconds=time.monotonic() - began)

    def reply(self, **event: Any) -> None:
        """Sends an event."""
        self.line.sendall(json.dumps(event).encode() + b"\n")

    async def serve(self) -> None:
        """Until it is closed."""
        self.line.setblocking(True)
        reader, _ = await asyncio.open_connection(sock=self.line.dup(), limit=1 << 24)
        while text := await reader.readline():
            command = json.loads(text)
            match command.pop("do"):
                case "add":
                    task = asyncio.create_task(self.generate(**command))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
                case "abort":
                    self.engine.tokenizer_manager.abort_request(command["id"])
                case "switch":
                    await self.switch(command["role"])
                case "counts":
                    self.counts()
                case "close":
                    return

    async def generate(
        self, id: str, prompt: list[int], tokens: int = 24, logprobs: bool = False, **more: Any
    ) -> None:
        """One request, greedy."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        try:
            output = await self.engine.async_generate(
                input_ids=prompt,
                sampling_params=sampling,
                rid=id,
                return_logprob=logprobs,
                top_logprobs_num=3 if logprobs else 0,
                **more,
            )
        except Exception as error:  # SGLang raises where a server answers with a status
            self.reply(event="finished", id=id, tokens=[], reason={"error": str(error)})
            return
        meta = output["meta_info"]
        self.reply(
            event="finished",
            id=id,
            tokens=output["output_ids"],
            reason=meta["finish_reason"],
            logprobs=[meta.get("output_token_logprobs"), meta.get("output_top_logprobs")],
            cached=meta.get("cached_tokens"),
        )

    async def switch(self, role: str) -> None:
        """SGLang's role switch."""
        from sglang.srt.managers.io_struct import PdRoleSwitchReqInput

        asked = PdRoleSwitchReqInput(new_role=role, decode_cuda_graph_memory_gb=0.0)
        answer = await self.engine.tokenizer_manager.pd_role_switch(asked)
        self.reply(event="switched", success=answer.success, message=answer.message)

    def counts(self) -> None:
        """`watched.counts` of every rank."""
        with tempfile.TemporaryDirectory() as folder:
            self.engine.collective_rpc("kvpool_counts", folder=folder)
            found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        self.reply(event="counts", ranks=found)


def run(line: socket.socket, arguments: dict[str, Any]) -> None:
    """One engine, until its socket ends."""
    served = Served(line, arguments)
    asyncio.get_event_loop().run_until_complete(served.serve())
    served.engine.shutdown()


def main() -> None:
    """Forks engines until the socket ends."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.prefill
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's would import all again
    serve(int(sys.argv[1]), run)


if __name__ == "__main__":
    main()
