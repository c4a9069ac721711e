"""What floors stand on, on loopback: a server of S3, Mooncake's master, and memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.outputs import output_of
from tests.ports import free_port
from tests.processes import started

MIB = 1 << 20
BUCKET = "bucket"
S3 = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
application = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
"""
COMMAND = "from disagg.cli.store.command import store; store()"
SERVE = sys.executable, "-c", COMMAND, "serve"
"""`kvpool store serve`, also where kvpool's commands are those of another checkout."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def opened(url: str, method: str = "GET", limit: float = 30.0) -> None:
    """Asks until there is an answer, or fails."""
    until = time.monotonic() + limit
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with suppress(OSError):
            opener.open(urllib.request.Request(url, method=method), timeout=5).close()
            return
        assert time.monotonic() < until, f"{url} does not answer"
        time.sleep(0.05)


def listening(port: int, limit: float = 30.0) -> None:
    """Waits until a port of loopback takes connections, or fails."""
    until = time.monotonic() + limit
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        assert time.monotonic() < until, f"nothing listens on port {port}"
        time.sleep(0.05)


class S3Server:
    """A process that speaks S3, with one bucket. It forgets all when it ends."""

    def __init__(self, **environment: str) -> None:
        self.port, self._environment = free_port(), environment

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "", bucket: str = BUCKET, **options: Any) -> str:
        named = {"endpoint": self.endpoint, "region": "us-east-1", **options}
        query = "&".join(f"{name}={value}" for name, value in named.items())
        return f"s3://{bucket}/{prefix}?{query}"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[Any]]:
        command = [sys.executable, "-c", S3, str(self.port)]
        environment = os.environ | self._environment
        with started(command, stderr=subprocess.DEVNULL, env=environment) as process:
            opened(self.endpoint)
            opened(f"{self.endpoint}/{BUCKET}", method="PUT")
            yield process


SNAPSHOTS = {
    "enable_snapshot": "true",
    "enable_snapshot_restore": "true",
    "snapshot_object_store_type": "local",
    "snapshot_interval_seconds": 1,
}


class Master:
    """Mooncake's master, with ports that it keeps when it is started again. With `snapshots`, a
    folder, it writes there every second what lies where, and begins with that.
    """

    def __init__(self, snapshots: Path | None = None, **flags: Any) -> None:
        self.port, self.http_port = free_port(), free_port()
        self._known = False
        """Whether it has been there, at ports that others know."""
        self._environment = dict(os.environ)
        if snapshots is not None:
            self._environment["MOONCAKE_SNAPSHOT_LOCAL_PATH"] = str(snapshots)
            flags = SNAPSHOTS | {"snapshot_backup_dir": snapshots} | flags
        self._flags = {
            "rpc_address": "127.0.0.1",
            "metrics_host": "127.0.0.1",
            "client_ttl": 120,  # of a machine that is busy
            "minloglevel": 2,
            "logtostderr": "true",
            **flags,
        }

    def url(self, **options: Any) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"mooncake://127.0.0.1:{self.port}?http={self.http_port}&{query}".rstrip("&")

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[Any]]:
        import mooncake  # which a machine may be without

        program = str(Path(next(iter(mooncake.__path__))) / "mooncake_master")
        options = {"stderr": subprocess.DEVNULL, "env": self._environment}
        flags = [f"--{name}={value}" for name, value in self._flags.items()]
        while True:
            ports = [f"--rpc_port={self.port}", f"--metrics_port={self.http_port}"]
            with started([program, *flags, *ports], **options) as process:
                if self._answers(process):
                    self._known = True
                    yield process
                    return
            # another server has taken one of them since it was found free
            assert not self._known, f"the master ended with status {process.returncode}"
            self.port, self.http_port = free_port(), free_port()

    def _answers(self, process: subprocess.Popen[Any]) -> bool:
        """Waits until it serves; False if it has ended."""
        until = time.monotonic() + 30
        url = f"http://127.0.0.1:{self.http_port}/health"
        while process.poll() is None:
            with suppress(OSError, AssertionError):
                opened(url, limit=0.0)
                listening(self.port, limit=0.0)  # which begins later
                return True
            assert time.monotonic() < until, f"{url} does not answer"
            time.sleep(0.05)
        return False


JOIN = """
import sys, time
from disagg.store.floors import open_floor
from disagg.store.floors.base import FloorError
floor = open_floor(sys.argv[1])
for left in range(20, -1, -1):  # on a busy machine a master may take too long to answer
    try:
        floor.exists(["joined"])
        break
    except FloorError:
        if not left:
            raise
        time.sleep(1)
print("joined", flush=True)
"""
HOLD = JOIN + "sys.stdin.read()"


@contextmanager
def memory_of(master: Master, nbytes: int = 64 * MIB) -> Iterator[subprocess.Popen[Any]]:
    """A process that offers memory to a master."""
    command = [sys.executable, "-c", HOLD, master.url(memory=f"{nbytes}b")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with started(command, **pipes) as process:
        assert process.stdout.readline() == b"joined\n"
        yield process


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[Any], dict[str, Any]]]:
    """`kvpool store serve` with free ports, and what it prints."""
    ports = "--port", str(free_port()), "--http-port", str(free_port())
    command = [*SERVE, *ports, "--json", *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        line = process.stdout.readline()
        assert line, "kvpool store serve has ended"
        yield process, output_of("store serve", line)


@contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """It hangs meanwhile."""
    process.send_signal(signal.SIGSTOP)
    # its threads on other cores run on for a moment
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
