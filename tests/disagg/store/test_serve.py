"""`kvpool store serve`: a master and memory that begin and end with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing, suppress

import pytest
from typer.testing import CliRunner

from disagg.cli.store.command import store
from disagg.store.floors import open_floor
from disagg.store.floors.base import FloorFull
from tests.disagg.store.servers import SERVE, serving
from tests.ports import free_port
from tests.processes import until

MIB = 1 << 20


def alive(pid):
    with suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def run(*options):
    return subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_prints_a_url_that_can_be_used_and_ends_with_its_master(number):
    with serving("--memory", "32MiB") as (process, fields):
        assert {*fields} == {"url", "host", "port", "http_port", "memory", "pid"}
        assert fields["url"] == f"mooncake://127.0.0.1:{fields['port']}?http={fields['http_port']}"
        assert fields["memory"] == 32 * MIB
        with closing(open_floor(fields["url"])) as floor:
            assert floor.create("a/b", [b"x" * 1000])
            with floor.read("a/b", [(990, 1000)]) as (buffer,):
                assert buffer == b"x" * 10
            assert [entry.size for entry in floor.list("")] == [1000]
        assert alive(fields["pid"])
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stdout.read() == b""
        assert not alive(fields["pid"])


def test_a_line_says_where_the_store_is():
    ports = "--port", str(free_port()), "--http-port", str(free_port())
    command = [*SERVE, *ports, "--memory", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        line = process.stdout.readline().decode()
        process.terminate()
        assert line == f"store: mooncake://127.0.0.1:{ports[1]}?http={ports[3]}\n"
        assert process.wait(60) == 0


def test_its_master_ends_with_it_however_it_ends():
    with serving("--memory", "16MiB") as (process, fields):
        process.kill()
        process.wait()
        until(lambda: not alive(fields["pid"]))


def test_a_master_that_ends_is_told_and_ends_the_command():
    with serving("--memory", "16MiB") as (process, fields):
        os.kill(fields["pid"], signal.SIGKILL)
        assert process.wait(60) == 1


def test_without_memory_of_its_own_engines_give_theirs():
    with serving("--memory", "0b") as (_, fields):
        assert fields["memory"] == 0
        with closing(open_floor(fields["url"])) as floor, pytest.raises(FloorFull):
            floor.create("a/b", [b"x"])
        with closing(open_floor(f"{fields['url']}&memory=32MiB")) as floor:
            assert floor.create("a/b", [b"x"])


def test_a_port_that_is_taken_is_named():
    with serving("--memory", "0b") as (_, fields):
        for ports in (
            ("--port", str(fields["port"]), "--http-port", str(free_port())),
            ("--port", str(free_port()), "--http-port", str(fields["http_port"])),
        ):
            done = run(*ports)
            taken = fields["port"] if str(fields["port"]) in ports else fields["http_port"]
            words = f"127.0.0.1:{taken} cannot be used: Address already in use. Choose other ports"
            assert done.returncode == 1 and words in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--memory", "4Q"), 2, "--memory '4Q': bytes, or a number of kB"),
        (("--memory", "0"), 2, "--memory '0'"),
        (("--port", "0"), 2, "Invalid value for '--port'"),
        (("--host", "0.0.0.0"), 2, "an address of this host at which the others reach it"),
        (("--host", "192.0.2.1", "--memory", "0b"), 1, "192.0.2.1:50051 cannot be used: Cannot"),
        (("--host", "no-such-host.invalid"), 1, "no-such-host.invalid:50051 cannot be used"),
    ],
)
def test_what_cannot_be_served_is_refused(options, code, words):
    done = run(*options)
    assert done.returncode == code and not done.stdout
    assert words in " ".join(done.stderr.replace("│", " ").split())


def test_without_mooncake_the_command_says_how_to_install_it():
    code = f"import sys; sys.modules['mooncake'] = None; {SERVE[2]}"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Mooncake is not installed: pip install 'kvpool[mooncake]'" in done.stderr


def test_help_lists_the_commands_and_the_urls():
    done = CliRunner().invoke(store, ["--help"])
    assert done.exit_code == 0 and "serve" in done.stdout and "s3://bucket/prefix" in done.stdout
    done = CliRunner().invoke(store, ["serve", "--help"])
    assert done.exit_code == 0 and "firewall" in done.stdout
