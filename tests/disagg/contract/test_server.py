"""An engine's contract over HTTP, by real sockets: what is asked for and no more, within bounds."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from disagg.contract import client, server
from disagg.contract.client import read_contract
from disagg.contract.labelling import labels
from disagg.contract.server import ContractServer
from tests.disagg.contract.sides import Split
from tests.disagg.runtime.transports import ADDRESSES
from tests.ports import free_port

CONTRACT = Split(tp=2, conventions={"model": "a"}).contract()


@pytest.fixture
def served():
    with ContractServer("127.0.0.1:*", CONTRACT) as running:
        yield running


def ask(served, path):
    with urlopen(f"http://{served.address}{path}", timeout=10) as answer:
        return answer.read(), answer.headers["Content-Type"]


def place(served):
    host, _, port = served.address.rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def talking(served):
    with socket.create_connection(place(served), timeout=20) as connection:
        yield connection


def rest(connection) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            data += more
    return data


def test_from_drain_on_it_says_so_and_the_contract_stays(served):
    assert ask(served, "/healthz") == (b"ok\n", "text/plain")
    for _ in range(2):
        served.drain()
        with pytest.raises(HTTPError) as error:
            ask(served, "/healthz")
        assert error.value.code == 503 and error.value.read() == b"draining\n"
    assert ask(served, "/contract")[0] == CONTRACT.to_json().encode()


def test_it_answers_its_three_paths(served):
    assert ask(served, "/contract") == (CONTRACT.to_json().encode(), "application/json")
    assert ask(served, "/contract?x=1")[0] == CONTRACT.to_json().encode()
    text, kind = ask(served, "/labels")
    assert (json.loads(text), kind) == (labels(CONTRACT), "application/json")
    assert ask(served, "/healthz") == (b"ok\n", "text/plain")
    with pytest.raises(HTTPError, match="404"):
        ask(served, "/metrics")


def test_a_contract_is_read_from_there(served, tmp_path):
    address = f"http://{served.address}"
    assert read_contract(address) == read_contract(f"{address}/contract") == CONTRACT
    file = tmp_path / "a,b.json"
    file.write_bytes(ask(served, "/contract")[0])
    assert read_contract(str(file)) == CONTRACT


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "x" * 100])
def test_other_methods_are_refused(served, method):
    with talking(served) as connection:
        connection.sendall(f"{method} /contract HTTP/1.1\r\n\r\n".encode())
        assert rest(connection).startswith(b"HTTP/1.0 501")


def test_no_body_is_read(served):
    """It is longer than all buffers between the two."""
    with talking(served) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        assert rest(connection).endswith(b"ok\n")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(bytes(1 << 20))


@pytest.mark.parametrize("head", [b"a" * (64 << 10), b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9000])
def test_a_long_request_is_closed_without_an_answer(served, head):
    with talking(served) as connection:
        with suppress(ConnectionError):
            connection.sendall(head)
        assert rest(connection) == b""
    assert ask(served, "/healthz")[0] == b"ok\n"


@pytest.mark.parametrize("head", [b"", b"GET /contr", b"\0\xff" * 50 + b"\r\n\r\n", b"\r\n\r\n"])
def test_what_is_no_request_does_no_harm(served, head):
    with talking(served) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        assert b"200" not in rest(connection)[:20]
    assert ask(served, "/healthz")[0] == b"ok\n"


def test_who_says_nothing_or_drips_has_a_few_seconds_in_all(served, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with talking(served) as silent, talking(served) as dripping:
        began, closed = time.monotonic(), False
        with suppress(ConnectionError):
            while time.monotonic() - began < 10 and not closed:
                dripping.sendall(b"a")
                dripping.settimeout(0.05)
                with suppress(TimeoutError):
                    closed = dripping.recv(1) == b""
        assert time.monotonic() - began < 5
        assert rest(silent) == b""


def test_more_readers_than_are_answered_are_closed_and_the_others_served(served, monkeypatch):
    with ExitStack() as stack:
        waiting = [stack.enter_context(talking(served)) for _ in range(server.MAX_READERS)]
        for connection in waiting:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        with talking(served) as refused:
            assert rest(refused) == b""
        assert threading.active_count() < server.MAX_READERS + 20
        for connection in waiting:
            connection.sendall(b"\r\n")
            assert rest(connection).endswith(b"ok\n")


def test_it_listens_where_it_was_asked_to_and_nowhere_else(served):
    host, port = place(served)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    served.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)


def test_ranks_listen_beside_one_another_and_are_read_by_the_first_address():
    port = free_port()
    with ExitStack() as stack:
        for number, rank in enumerate(CONTRACT.ranks):
            part = replace(CONTRACT, ranks=(rank,))
            stack.enter_context(ContractServer(f"127.0.0.1:{port}", part, number))
        first, second = (f"http://127.0.0.1:{port + number}" for number in range(2))
        assert read_contract(first) == read_contract(second) == CONTRACT
        assert read_contract(f"{second},{first}") == CONTRACT
    part = replace(CONTRACT, ranks=CONTRACT.ranks[:1])
    with (
        ContractServer("127.0.0.1:*", part) as alone,
        pytest.raises(ValueError, match=r"of one rank of 2: give the addresses of all"),
    ):
        read_contract(f"http://{alone.address}")


def test_an_address_of_ipv6():
    if "tcp://[::1]:*" not in ADDRESSES:  # this host has no IPv6
        with pytest.raises(ValueError, match=r"Cannot assign|not supported"):
            ContractServer("[::1]:*", CONTRACT)
        return
    with ContractServer("[::1]:*", CONTRACT) as served:
        assert served.address.startswith("[::1]:")
        assert read_contract(f"http://{served.address}") == CONTRACT


@pytest.mark.parametrize(
    ("where", "offset", "reason"),
    [
        ("127.0.0.1:65535", 7, "port 65542 of rank 7: a port is at most 65535"),
        ("no.such.host.invalid:1", 0, "Give HOST:PORT of this host."),
        ("127.0.0.1", 0, "an address is ipc://PATH or tcp://HOST:PORT"),
        ("203.0.113.7:9400", 0, "Cannot assign requested address"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_by_name(where, offset, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        ContractServer(where, CONTRACT, offset)
    assert str(refused.value).startswith(f"contract at {where}: ")


def test_a_place_that_is_taken_is_refused(served):
    with pytest.raises(ValueError, match="Address already in use"):
        ContractServer(served.address, CONTRACT)


@contextmanager
def answering(data: bytes):
    """A server that answers anybody with `data`, and says no more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 12)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "http://127.0.0.1:{1}".format(*listening.getsockname())
        thread.join(20)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no HTTP server answers there"),
        (b"SSH-2.0-x\r\n", "no HTTP server answers there"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "it answers 302"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "malformed contract"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 300_000, "which are more than are read"),
    ],
)
def test_any_server_may_stand_at_the_other_end(data, reason, monkeypatch):
    monkeypatch.setattr(client, "MAX_BYTES", 100_000)
    with answering(data) as address, pytest.raises(ValueError, match=reason) as refused:
        read_contract(address)
    assert str(refused.value).startswith(f"{address}: ")


@pytest.mark.parametrize(
    "source",
    [
        *("https://127.0.0.1:1", "ftp://127.0.0.1", "http://", "http://a@127.0.0.1:1"),
        *("http://127.0.0.1:1/other", "http://127.0.0.1:1/?a=b", "http://127.0.0.1:99999"),
        *("http://127.0.0.1:1", "/no/such/file", "/", ""),
    ],
)
def test_what_leads_to_no_contract_is_refused_with_its_name(source):
    with pytest.raises(ValueError) as refused:
        read_contract(source)
    assert str(refused.value).startswith(f"{source}: ")
