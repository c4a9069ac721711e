"""`kvpool store serve`: Mooncake's master and memory for a store of one host."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvpool.cli.output import fail

PR_SET_PDEATHSIG = 1
START_SECONDS = 30.0
END_SECONDS = 10.0
CLIENT_SECONDS = 60
"""Without a sign of life for so long, memory counts as gone, with all that lies in it. Mooncake's
10 seconds are short for a host whose processors are busy."""
HTTP_PORT = 9003

_HOST = "Address to listen at. Mooncake has no keys: any process at its ports reads all."
_MEMORY = "Memory of this process for objects; 0b: that of engines only (memory= in their URLs)."


class ServeFailed(Exception):
    """The master does not start; the message says why."""


def serve(
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The master's port.")] = 50051,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Its HTTP server's: lists and metrics.")
    ] = HTTP_PORT,
    memory: Annotated[str, typer.Option(help=_MEMORY)] = "4GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run Mooncake's master and memory for a store of one host, until Ctrl-C or SIGTERM.

    Prints the store's URL when it can be used. All that is stored ends with this command.

    Mooncake's ports have no keys and no encryption, and those for data, which every process of the
    store opens, listen at all addresses: keep them behind a firewall. A cluster has one master
    (mooncake_master, its --help), an address in --host that all hosts reach, and memory in each
    engine (?memory=64GiB in its URL) or in this command on each host.

    Exit status 1 if the master does not start or ends by itself.

    JSON: url, host, port, http_port, memory (bytes), pid (of the master).

    \b
    Example:
      kvpool store serve --memory 64GiB
    """
    from disagg.store.floors.mooncake_client import store_module
    from kvpool.extras import MissingExtra
    from kvpool.layout.units import parse_memory

    try:
        nbytes = 0 if memory == "0b" else parse_memory(memory, "--memory")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if host in ("0.0.0.0", "::"):
        raise typer.BadParameter("--host: an address of this host at which the others reach it.")
    stopping = _Stop()
    try:
        store_module()
        for number in (port, http_port):
            _check_free(host, number)
        with closing(_Master(host, port, http_port)) as master:
            url = master.url()
            master.wait_ready(stopping)
            offered = _offer(url, nbytes) if nbytes and not stopping.number else None
            fields = {"url": url, "host": host, "port": port, "http_port": http_port}
            fields |= {"memory": nbytes, "pid": master.process.pid}
            if not stopping.number:
                typer.echo(json.dumps(fields) if as_json else f"store: {url}")
            code = master.wait(stopping)
            if offered is not None and code is None:
                offered.close()  # while the master is there: else it waits for it
    except (ServeFailed, MissingExtra, OSError) as error:
        fail(str(error))
    if code is not None:
        typer.echo(f"mooncake_master has ended with status {code}.", err=True)
        raise typer.Exit(1)


class _Stop:
    """The first signal that asks this process to end."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


class _Master:
    """`mooncake_master` of Mooncake's wheel, which ends with this process however that ends."""

    def __init__(self, host: str, port: int, http_port: int) -> None:
        import mooncake

        program = Path(next(iter(mooncake.__path__))) / "mooncake_master"
        if not program.exists():
            raise ServeFailed(f"Mooncake's package has no {program}.")
        self._host, self._port, self._http_port = host, port, http_port
        address = socket.gethostbyname(host)
        flags = {
            "rpc_address": address,
            "rpc_port": port,
            "metrics_host": address,
            "metrics_port": http_port,
            "client_ttl": CLIENT_SECONDS,
            "enable_metric_reporting": "false",  # a line of log every ten seconds
            "minloglevel": 1,
            "logtostderr": "true",
        }
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

        def end_with_parent() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self.process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is this command's
            preexec_fn=end_with_parent,
            start_new_session=True,  # Ctrl-C comes to this process, which ends it in order
        )

    def url(self) -> str:
        http = f"?http={self._http_port}" if self._http_port != HTTP_PORT else ""
        return f"mooncake://{self._host}:{self._port}{http}"

    def wait_ready(self, stopping: _Stop) -> None:
        """Raises ServeFailed if it ends, or does not answer in time."""
        until = time.monotonic() + START_SECONDS
        while not stopping.number:
            if (code := self.process.poll()) is not None:
                raise ServeFailed(f"mooncake_master has ended with status {code} at its start.")
            with suppress(OSError, urllib.error.URLError):
                socket.create_connection((self._host, self._port), 1).close()
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                opener.open(f"http://{self._host}:{self._http_port}/health", timeout=2).close()
                return
            if time.monotonic() > until:
                raise ServeFailed(f"mooncake_master does not answer after {START_SECONDS:.0f} s.")
            time.sleep(0.05)

    def wait(self, stopping: _Stop) -> int | None:
        """Until it ends, with its status, or a signal comes, with None."""
        while not stopping.number:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.2)
        return None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()


def _check_free(host: str, port: int) -> None:
    """Raises ServeFailed. Mooncake's master would end without a word about the port."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ServeFailed(
                f"{host}:{port} cannot be used: {error.strerror or error}. Choose other ports by "
                "--port and --http-port."
            ) from None


def _offer(url: str, nbytes: int) -> Any:
    """A floor that offers memory as long as it is open."""
    from disagg.store.floors import open_floor

    floor = open_floor(f"{url}{'&' if '?' in url else '?'}memory={nbytes}b")
    floor.exists(["joined"])  # floors join at the first call
    return floor
