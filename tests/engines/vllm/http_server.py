"""`python -m tests.engines.vllm.http_server FD` imports vLLM once, and forks an API server for each
line (`tests.engines.launcher`). Its engine core and workers are forked too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import uvloop
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engines.launcher import serve
from tests.engines.vllm.servers import flags

# Linux 6.18 runs nothing else for a minute on cores that several processes spin on with sched_yield
shm_broadcast.sched_yield = lambda: time.sleep(0.0001)


def run(line: socket.socket, arguments: dict[str, Any]) -> None:
    """One server, until it is killed."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(flags(arguments))
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    serve(int(sys.argv[1]), run)
