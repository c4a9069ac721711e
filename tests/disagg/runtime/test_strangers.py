"""What strangers can do to endpoints over unix sockets and insecure TCP, and what they cannot."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.protocol.codec import encode
from tests import oracle
from tests.disagg.runtime.sides import TOKENS, PrefillProcess, pool, prefill_process
from tests.disagg.waiting import until
from tests.processes import Child
from tests.streams import dial, frame

LOOPBACK = "tcp://127.0.0.1:*"
OTHER_USER = 65534
MIB = 1 << 20


def push(stranger, data):
    """Sends as long as the other end takes it."""
    stranger.socket.settimeout(20)
    with suppress(OSError):
        stranger.socket.sendall(data)


def test_unfinished_messages_take_no_more_memory_than_the_bound():
    with prefill_process() as prefill:
        prefill.works("before")
        before, highest = prefill.resident(), 0
        part = struct.pack(">I", 62 * MIB) + bytes(60 * MIB)
        with ExitStack() as stack:
            strangers = [stack.enter_context(dial(prefill.address)) for _ in range(7)]
            threads = [threading.Thread(target=push, args=(each, part)) for each in strangers]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                highest = max(highest, prefill.resident())
                time.sleep(0.01)
            highest = max(highest, prefill.resident())
            assert highest - before > 100 * MIB  # they were taken in
            assert highest - before < (256 + 64) * MIB
            prefill.works("beside")
        prefill.works("after")


def test_tiny_messages_take_no_memory():
    with prefill_process() as prefill:
        prefill.works("before")
        before = prefill.resident()
        with dial(prefill.address) as stranger:
            push(stranger, frame(b"\xc1") * (12 * MIB // 5))
            prefill.works("beside")
            assert prefill.resident() - before < 32 * MIB
        prefill.works("after")


@pytest.fixture(params=["unix", "tcp", "tls"])
def options(request, keys):
    """Of a prefill over each kind of connection."""
    kinds = {"unix": {}, "tcp": {"insecure": True}, "tls": {"keys": keys}}
    return kinds[request.param] | {"bind": None if request.param == "unix" else LOOPBACK}


@pytest.mark.parametrize("data", [b"", b"\0" * 4, b"GET / HTTP/1.1\r\n\r\n", frame(b"\xc1")])
def test_whatever_strangers_say_first_the_others_are_served(data, options):
    with prefill_process(**options) as prefill, dial(prefill.address) as stranger:
        stranger.socket.sendall(data)
        prefill.works("beside")


# users


def demoted(pipe, target, *args):
    """As another user it runs `target(pipe, *args)`."""
    os.setgroups([])
    os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
    target(pipe, *args)


def say_and_listen(pipe, address, message):
    """Sends a message, and tells what comes back."""
    with dial(address) as stranger:
        with suppress(BrokenPipeError):  # it is closed already
            stranger.send(message)
        pipe.send(stranger.receive())


def stay_silent(pipe, address, count):
    """Connects so many times and says nothing; tells how many of these stay open."""
    with ExitStack() as stack:
        strangers = [stack.enter_context(dial(address)) for _ in range(count)]
        pipe.send(sum(not each.closed(5) for each in strangers))
        pipe.recv()


def squat(pipe, path):
    """Listens at a unix socket; tells what each of three that connect says first."""
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(path)
        Path(path).chmod(0o666)
        squatter.listen()
        pipe.send("there")
        for _ in range(3):
            connection, _ = squatter.accept()
            with connection:
                connection.settimeout(5)
                try:
                    pipe.send(connection.recv(1 << 16))
                    connection.sendall(frame(b"\xc1"))
                except (TimeoutError, ConnectionError):
                    pipe.send(None)


@pytest.fixture
def open_folder(tmp_path):
    """A folder that every user can write to, with a short name."""
    folder = Path("/tmp") / f"kvpool-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture
def open_prefill(open_folder):
    """A prefill whose socket every user can open."""
    source, path = pool(), open_folder / "p"
    with PrefillEndpoint(source.layout, create_engine("local"), f"ipc://{path}") as prefill:
        path.chmod(0o666)
        yield prefill


@pytest.fixture
def decode():
    dest = pool()
    with DecodeEndpoint(dest.layout, create_engine("local")) as endpoint:
        yield endpoint


@pytest.mark.root
def test_another_user_gets_no_answer_and_is_named(open_prefill, decode, caplog):
    hello = encode(decode.machine.hello)
    with Child(demoted, say_and_listen, open_prefill.address, hello) as stranger:
        assert stranger.answer() is None
    assert not open_prefill.machine.peers.alive
    assert f"it is user {OTHER_USER}'s, and this process is user 0's" in caplog.text
    decode.connect([open_prefill.address], timeout=20)


@pytest.mark.root
def test_silent_connections_of_another_user_are_closed_and_keep_no_decode_out(open_prefill, decode):
    with Child(demoted, stay_silent, open_prefill.address, 300) as stranger:
        assert stranger.answer() == 0
        decode.connect([open_prefill.address], timeout=20)


@pytest.mark.root
def test_with_insecure_another_user_is_answered_over_tcp(decode):
    source, hello = pool(), encode(decode.machine.hello)
    with (
        PrefillEndpoint(source.layout, create_engine("local"), LOOPBACK, insecure=True) as prefill,
        Child(demoted, say_and_listen, prefill.address, hello) as stranger,
    ):
        assert b"hello" in stranger.answer()


@pytest.mark.root
def test_another_user_that_takes_a_dead_prefills_place_is_told_nothing(open_folder, decode):
    source, bind = pool(), f"ipc://{open_folder / 'p'}"
    with PrefillEndpoint(source.layout, create_engine("local"), bind) as prefill:
        link = decode.connect([prefill.address], timeout=20)
    with Child(demoted, squat, bind.removeprefix("ipc://")) as squatter:
        assert squatter.answer() == "there"
        assert not any(squatter.answer() for _ in range(3))
        until(decode, lambda: f"it is user {OTHER_USER}'s" in str(link.lost))
    decode.receive("r", oracle.place(source, TOKENS))
    assert f"user {OTHER_USER}'s, and this process is user 0's" in str(decode.failure("r"))
    with PrefillEndpoint(source.layout, create_engine("local"), bind):
        until(decode, lambda: link.settled)


# addresses


@pytest.mark.parametrize("bind", [LOOPBACK, "tcp://*:*"])
def test_over_tcp_an_endpoint_without_keys_must_say_so(bind, decode, caplog):
    source = pool()
    ways = r"TCP needs keys on both sides .*keys=\.\.\. or tls=.*ipc://PATH, or say insecure=True"
    with pytest.raises(ValueError, match=ways) as refused:
        PrefillEndpoint(source.layout, create_engine("local"), bind)
    assert bind in str(refused.value)
    with pytest.raises(ValueError, match=f"'tcp://10.0.0.9:5': .*{ways}"):
        decode.connect(["tcp://10.0.0.9:5"])
    assert not caplog.records
    with prefill_process(LOOPBACK, insecure=True) as prefill:
        prefill.works("r")
    assert f"{prefill.address}: control messages without keys (insecure=True)" in caplog.text


def test_on_one_host_messages_take_a_unix_socket_that_only_its_user_can_open():
    with prefill_process(None) as prefill:
        path = Path(prefill.address.removeprefix("ipc://"))
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        prefill.works("r")
    assert not path.exists()


# ends


def test_a_dead_process_is_noticed_at_once(options):
    options["peer_timeout"] = 60
    dest = pool()
    mine = {name: value for name, value in options.items() if name != "bind"}
    with (
        prefill_process(**options) as alive,
        PrefillProcess(**options) as dying,
        DecodeEndpoint(dest.layout, create_engine("local"), **mine) as decode,
    ):
        link = decode.connect([dying.address], timeout=30)
        decode.receive("r", oracle.place(dest, TOKENS), link=link)
        dying.process.kill()
        assert decode.wait("r", 20) is KVPoll.Failed
        reason = str(decode.failure("r"))
        assert f"rank 0 of prefill ({dying.address}) is lost: its connection " in reason
        alive.works("other")
