"""Messages over unix sockets and TCP: in order, of one connection, or its end; within bounds."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import struct
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from disagg import Lost
from disagg.protocol.codec import MAX_MESSAGE
from disagg.runtime.sockets import connection
from tests.disagg.runtime.transports import (
    ADDRESSES,
    TCP,
    arrivals,
    both,
    collect,
    pair_of,
    receive,
)
from tests.processes import forked
from tests.streams import Server, dial, frame


@pytest.fixture
def listening(transports):
    """A transport that listens at a unix socket, and its endpoint address."""
    listener = transports()
    return listener, listener.bind("ipc://*")


@pytest.mark.parametrize("where", ADDRESSES)
def test_messages_of_any_size_arrive_in_order_both_ways(transports, where):
    listener, address, dialler = both(transports, where)
    assert "*" not in address
    sent = [os.urandom(size) for size in (1, 3, 4, 70_000, 300_000, 5 << 20, 17)]
    dialler.connect(3, address)
    for message in sent:
        assert dialler.send(3, message) is None
    arrived = receive(listener, len(sent), beside=[dialler])
    assert [data for _, data in arrived] == sent
    ((peer),) = {peer for peer, _ in arrived}
    assert isinstance(peer, bytes) and len(peer) == 16
    for message in sent:
        assert listener.send(peer, message) is None
    assert receive(dialler, len(sent), beside=[listener]) == [(3, message) for message in sent]


def test_frames_in_pieces_are_put_together(listening):
    listener, address = listening
    with dial(address) as stranger:
        for byte in frame(b"slow") + frame(b"er"):
            stranger.socket.sendall(bytes([byte]))
            found = [*listener.poll()]
            assert not found or found[0][1] in (b"slow", b"er")
        stranger.socket.sendall(frame(b"two") + frame(b"in one") + frame(b"and")[:3])
        assert [data for _, data in receive(listener, 2)] == [b"two", b"in one"]
        stranger.socket.sendall(frame(b"and")[3:])
        ((peer, data),) = receive(listener, 1)
        assert data == b"and"
        listener.send(peer, b"back")
        listener.flush()
        assert stranger.receive() == b"back"


@pytest.mark.parametrize("length", [0, MAX_MESSAGE + 1, 0xFF000000])
def test_a_length_that_no_message_has_ends_the_connection_after_the_messages_before(
    listening, length, caplog
):
    listener, address = listening
    with dial(address) as stranger:
        stranger.socket.sendall(frame(b"good") + struct.pack(">I", length) + b"rest")
        (peer, data), (lost, end) = receive(listener, 2)
        assert (data, lost) == (b"good", peer)
        assert isinstance(end, Lost) and "keys set on one side only?" in end.reason
        assert stranger.closed()
    assert f"a length of {length:,} bytes" in caplog.text


def test_memory_is_taken_for_what_has_come_and_not_for_what_is_announced(listening):
    listener, address = listening
    with dial(address) as stranger:
        tracemalloc.start()
        stranger.socket.sendall(struct.pack(">I", MAX_MESSAGE) + b"x" * 1000)
        for _ in range(5):
            assert not arrivals(listener, 0.02)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_what_waits_for_nobody_arrives_once_somebody_listens(transports, tmp_path):
    dialler, path = transports(), tmp_path / "late"
    dialler.connect(1, f"ipc://{path}")
    for number in range(20):
        assert dialler.send(1, b"%d" % number) is None
    assert not arrivals(dialler, 0.05)  # nobody there is no news
    late = transports()
    late.bind(f"ipc://{path}")
    arrived = receive(late, 20, beside=[dialler])
    assert [data for _, data in arrived] == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("where", ADDRESSES[:3])
def test_a_peer_that_ends_is_told_after_its_last_message_on_both_sides(transports, where):
    listener, address, dialler = both(transports, where)
    name = pair_of(listener, address, dialler)
    dialler.send(7, b"last words")
    dialler.close()
    assert receive(listener, 2)[0] == (name, b"last words")
    assert listener.send(name, b"x") == "it cannot be reached: its connection has ended."

    again = transports("decode" if where == "tls" else None)
    name = pair_of(listener, address, again)
    listener.send(name, b"last words")
    listener.close()
    (peer, data), (lost, end) = receive(again, 2)
    assert (peer, data, lost, end) == (7, b"last words", 7, Lost("its connection has ended."))
    assert "it cannot be reached" in again.send(7, b"x")


def test_who_hangs_up_without_a_word_was_not_the_peer_and_the_next_gets_the_same(transports):
    """A prefill that is just ending, for instance: nothing is lost, and nothing is told."""
    dialler = transports()
    with Server() as server:
        dialler.connect(1, server.address)
        dialler.send(1, b"hello")
        for _ in range(3):
            assert not [*dialler.poll()]
            with server.accept() as stranger:
                assert not arrivals(dialler, 0.05)
                assert stranger.receive() == b"hello"
            assert not arrivals(dialler, 0.15)
            assert not arrivals(dialler, 0.15)


def test_a_lost_peer_is_dialled_again_after_a_pause(transports):
    dialler = transports()
    with Server() as server:
        dialler.connect(1, server.address)
        dialler.send(1, b"hello")
        began, told = time.monotonic(), 0
        for _ in range(4):
            assert not [*dialler.poll()]
            with server.accept() as stranger:
                stranger.receive()
                stranger.send(b"yes")
                assert receive(dialler, 1) == [(1, b"yes")]
            assert isinstance(receive(dialler, 1)[0][1], Lost)
            dialler.connect(1, server.address)
            dialler.send(1, b"hello")
            until = time.monotonic() + 0.25
            while time.monotonic() < until:
                told += len(arrivals(dialler, 0.05))
        assert told == 0
        assert time.monotonic() - began > 0.4


@pytest.mark.parametrize("again", [True, False])
def test_what_was_sent_over_a_replaced_connection_leaves_and_nothing_of_it_returns(
    transports, again
):
    dialler = transports()
    with Server() as server:
        dialler.connect(1, server.address)
        dialler.send(1, b"before")
        assert not [*dialler.poll()]
        with server.accept() as old:
            dialler.connect(1, server.address if again else None)
            old.send(b"of the old one")
            assert dialler.send(1, b"after") == (
                None if again else "it cannot be reached: its connection has ended."
            )
            assert old.receive() == b"before"
            assert not arrivals(dialler, 0.05)
            assert old.receive() is None
            assert not arrivals(dialler, 0.05)
            if again:
                with server.accept() as new:
                    assert new.receive() == b"after"
                    new.send(b"of the new one")
                    assert receive(dialler, 1) == [(1, b"of the new one")]


def test_a_peer_that_does_not_read_is_told_truly_and_holds_no_more_than_the_bound(
    listening, transports, monkeypatch
):
    listener, address = listening
    monkeypatch.setattr(connection, "QUEUED", 50)
    with dial(address) as stranger:
        stranger.send(b"hello")
        ((peer, _),) = receive(listener, 1)
        sent = 0
        while (problem := listener.send(peer, b"x" * 10_000)) is None:
            listener.flush()
            sent += 1
        assert problem.startswith("it does not read what is sent: 50 messages (")
        assert 50 < sent < 1000
        assert "it cannot be reached" in listener.send(peer, b"x")
        assert stranger.closed()
    monkeypatch.setattr(connection, "MAX_UNSENT", 1 << 20)
    dialler = transports()
    dialler.connect(1, "tcp://127.0.0.1:9")
    assert dialler.send(1, b"x" * 1_000_000) is None
    assert "1 messages (1,000,004 bytes) wait for it" in dialler.send(1, b"x" * 100_000)


def test_the_peer_for_which_the_most_waits_is_given_up_when_too_much_waits_for_all(
    listening, monkeypatch
):
    listener, address = listening
    monkeypatch.setattr(connection, "MAX_UNSENT_BY_ALL", 8 << 20)
    with dial(address) as one, dial(address) as two:
        names = {}
        for stranger, name in ((one, b"one"), (two, b"two")):
            stranger.send(name)
            names[name] = receive(listener, 1)[0][0]
        listener.send(names[b"one"], b"x" * (2 << 20))
        listener.send(names[b"two"], b"x" * (12 << 20))
        ((peer, end),) = collect(listener, bool)
        assert (peer, type(end)) == (names[b"two"], Lost)
        assert listener.send(names[b"one"], b"y") is None


def test_an_unfinished_message_has_a_time_to_end_and_a_first_message_to_come(
    listening, monkeypatch
):
    listener, address = listening
    monkeypatch.setattr(connection, "MAX_SILENT", 1)
    monkeypatch.setattr(connection, "MAX_UNFINISHED", 2)
    with dial(address) as silent, dial(address) as slow, dial(address) as good:
        slow.send(b"hello")
        good.send(b"hello")
        ((one, _), (two, _)) = receive(listener, 2)
        slow.socket.sendall(frame(b"never ended")[:-1])
        collect(listener, lambda _: silent.closed(0.01))
        assert not slow.closed(0.01)
        ((peer, end),) = collect(listener, bool)
        assert peer in (one, two) and "not finished within 2 s" in end.reason
        assert slow.closed()
        good.send(b"still here")  # silence between messages is the protocol's matter
        assert [data for _, data in receive(listener, 1)] == [b"still here"]


def test_the_connection_that_holds_the_most_is_closed_when_all_hold_too_much(
    listening, monkeypatch
):
    listener, address = listening
    monkeypatch.setattr(connection, "MAX_UNREAD", 4 << 20)
    with dial(address) as small, dial(address) as large:
        parts = (
            (small, struct.pack(">I", 2 << 20) + bytes(1 << 20)),
            (large, struct.pack(">I", 8 << 20) + bytes(7 << 20)),
        )
        for stranger, part in parts:
            sender = threading.Thread(target=send_all, args=(stranger, part))
            sender.start()
            until = time.monotonic() + 20
            while sender.is_alive() and time.monotonic() < until:
                assert not arrivals(listener, 0.01)
            sender.join(1)
        assert large.closed()
        send_all(small, bytes(1 << 10))
        assert not arrivals(listener, 0.05)
        assert not small.closed(0.1)


def send_all(stranger, data):
    """Sends until the other end closes."""
    with suppress(ConnectionError):
        stranger.socket.sendall(data)


def test_above_the_bound_the_oldest_connection_that_has_said_nothing_makes_room(
    transports, monkeypatch
):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 5)
    listener = transports()
    address = listener.bind("ipc://*")
    with ExitStack() as stack:

        def dialled():
            return stack.enter_context(dial(address))

        spoken = [dialled() for _ in range(3)]
        for stranger in spoken:
            stranger.send(b"hello")
        receive(listener, 3)
        silent = [dialled() for _ in range(4)]
        assert not arrivals(listener, 0.05)
        assert [each.closed(0.1) for each in silent] == [True] * 2 + [False] * 2
        for stranger in silent[2:]:
            stranger.send(b"late")
        assert len(receive(listener, 2)) == 2
        late = dialled()  # of those who have spoken none makes room
        assert not arrivals(listener, 0.05)
        assert late.closed()
        assert not any(each.closed(0.01) for each in (*spoken, *silent[2:]))


@pytest.mark.parametrize("where", ADDRESSES[:3])
def test_however_many_are_silent_a_peer_that_speaks_is_heard(transports, where, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    listener, address, dialler = both(transports, where)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(dial(address))
        pair_of(listener, address, dialler)
        for _ in range(100):
            stack.enter_context(dial(address))
        assert dialler.send(7, b"still there") is None
        assert receive(listener, 1, beside=[dialler])[0][1] == b"still there"


@contextmanager
def no_more_files():
    """The process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with pytest.raises(OSError) as full:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert full.value.errno == errno.EMFILE
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_file_left_nothing_is_accepted_nothing_spins_and_later_all_goes_on(listening):
    listener, address = listening
    with dial(address) as stranger:
        stranger.send(b"hello")
        with no_more_files():
            turns, until = 0, time.monotonic() + 0.5
            while time.monotonic() < until:
                assert not arrivals(listener, 1.0)
                turns += 1
            assert turns < 20
        assert [data for _, data in receive(listener, 1)] == [b"hello"]


def test_a_peer_that_sends_without_end_does_not_starve_another(listening):
    listener, address = listening
    stop = threading.Event()

    def flood():
        with dial(address) as stranger:
            while not stop.is_set():
                stranger.socket.sendall(frame(b"x") * 10_000)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        collect(listener, lambda found: len(found) > 10_000)
        with dial(address) as other:
            other.send(b"me too")
            turns = [[data for _, data in arrivals(listener, 0.01)] for _ in range(5)]
            assert any(b"me too" in turn for turn in turns)
            assert max(map(len, turns)) <= 1001
    finally:
        stop.set()
        while thread.is_alive():
            arrivals(listener, 0.01)
        thread.join()


def test_a_unix_socket_is_its_users_alone_and_goes_with_the_transport(transports, tmp_path):
    listener, path = transports(), tmp_path / "socket"
    assert listener.bind(f"ipc://{path}") == f"ipc://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="another process listens there"):
        transports().bind(f"ipc://{path}")
    listener.close()
    assert not path.exists()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    listener = transports()
    listener.bind(f"ipc://{path}")
    path.unlink()
    path.write_text("another's by now")
    listener.close()
    assert path.read_text() == "another's by now"
    with pytest.raises(ValueError, match="a file that is no socket lies there"):
        transports().bind(f"ipc://{path}")


def test_keys_of_the_other_side_are_refused(transports):
    with pytest.raises(ValueError, match="these are decode's keys"):
        transports("decode").bind(TCP)
    with pytest.raises(ValueError, match="these are prefill's keys"):
        transports("prefill").connect(1, "tcp://127.0.0.1:5")


def test_a_file_that_can_be_read_ends_the_wait_also_under_a_number_of_before(transports):
    transport, numbers = transports(), set()
    for _ in range(2):
        read, write = os.pipe()
        numbers.add(read)
        began = time.monotonic()
        assert not arrivals(transport, 0.01, read)
        os.write(write, b"x")
        assert not arrivals(transport, 60.0, read)
        assert time.monotonic() - began < 30
        os.close(read)
        os.close(write)
    assert len(numbers) == 1


def test_a_wait_of_less_than_a_millisecond_is_as_short(transports):
    transport, shortest = transports(), 1.0
    until = time.monotonic() + 20
    while shortest >= 0.0009 and time.monotonic() < until:  # some waits find no core when they end
        began = time.monotonic()
        assert not arrivals(transport, 0.0002)
        shortest = min(shortest, time.monotonic() - began)
        assert shortest >= 0.0002
    assert shortest < 0.0009


@pytest.mark.parametrize("where", ADDRESSES[:3])
def test_closing_sends_what_was_sent(transports, where):
    listener, address, dialler = both(transports, where)
    name = pair_of(listener, address, dialler)
    size = 1 << 16  # ten of which leave within CLOSE_LINGER_SECONDS
    heard = threading.Thread(target=lambda: data.extend(collect(dialler, lambda f: len(f) == 11)))
    data = []
    heard.start()
    for number in range(10):
        listener.send(name, bytes([number]) * size)
        listener.flush()
    listener.close()
    heard.join(20)
    assert all(message == bytes([n]) * size for n, (_, message) in enumerate(data[:10]))
    assert isinstance(data[10][1], Lost)


def test_a_forked_child_that_abandons_leaves_the_parents_connections_alone(transports):
    listener, dialler = transports(), transports()
    address = listener.bind("ipc://*")
    name = pair_of(listener, address, dialler)

    def child():
        before = len(os.listdir("/proc/self/fd"))
        for transport in (listener, dialler):
            transport.abandon()
            transport.close()
        return before - len(os.listdir("/proc/self/fd"))

    with forked(child) as (_, closed):
        assert closed == "5"  # 3 sockets, 2 epoll sets
    assert listener.send(name, b"down") is dialler.send(7, b"up") is None
    listener.flush()
    assert receive(dialler, 1) == [(7, b"down")]
    assert receive(listener, 1) == [(name, b"up")]
    pair_of(listener, address, dialler, peer=8)


def test_a_transport_that_is_bound_anew_listens_there_only(transports, tmp_path):
    listener, dialler = transports(), transports()
    old = listener.bind("ipc://*")
    listener.send(pair_of(listener, old, dialler), b"welcome")
    assert receive(dialler, 1, beside=[listener]) == [(7, b"welcome")]
    new = listener.bind("ipc://*")
    assert not Path(old.removeprefix("ipc://")).exists()
    assert isinstance(receive(dialler, 1, beside=[listener])[0][1], Lost)
    dialler.connect(7, None)
    pair_of(listener, new, dialler, peer=8)
