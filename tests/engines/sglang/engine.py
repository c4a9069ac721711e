"""One real SGLang engine in processes of its own, driven by lines of JSON over a socket.

`python -m tests.engines.sglang.engine FD '{"model_path": ..., ...}'`. Commands: `add` (a request),
`abort`, `counts` (what the scheduler of each rank holds), `close`. Each line that comes back is an
event.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


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
                case "counts":
                    self.counts()
                case "close":
                    return

    async def generate(
        self, id: str, prompt: list[int], tokens: int, logprobs: bool = False, **bootstrap: Any
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
                **bootstrap,
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

    def counts(self) -> None:
        """`watched.counts` of every rank."""
        with tempfile.TemporaryDirectory() as folder:
            self.engine.collective_rpc("kvpool_counts", folder=folder)
            found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        self.reply(event="counts", ranks=found)


def main() -> None:
    """Serves until the socket ends."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with socket.socket(fileno=int(sys.argv[1])) as own:
        served = Served(own, json.loads(sys.argv[2]))
        asyncio.get_event_loop().run_until_complete(served.serve())
        served.engine.shutdown()


if __name__ == "__main__":
    main()
