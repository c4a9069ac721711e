"""`python -m tests.engines.sglang.http_server FD` imports SGLang once, and forks an API server for
each line (`tests.engines.launcher`). Its scheduler and detokenizer are forked too.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from tests.engines.launcher import serve


def run(line: socket.socket, arguments: dict[str, Any]) -> None:
    """One server, until it is killed. What it counts is in a folder of its own."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = mkdtemp(dir=os.environ["PROMETHEUS_MULTIPROC_DIR"])
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    launch_server(ServerArgs(**arguments))


def main() -> None:
    """Forks servers until the socket ends."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # prometheus_client asks when it is imported whether several processes count
    counts = TemporaryDirectory()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts.name
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.prefill
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's would import all again
    with counts:
        serve(int(sys.argv[1]), run)


if __name__ == "__main__":
    main()
