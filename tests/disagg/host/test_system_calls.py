"""System calls that keep the GIL do what Python's own do."""

from __future__ import annotations

import os
import select
import socket

import pytest

from disagg.host import system_calls


@pytest.fixture
def pair():
    both = socket.socketpair()
    for each in both:
        each.setblocking(False)
    with both[0], both[1]:
        yield both


def test_bytes_go_over_a_socket_and_its_end_is_seen(pair):
    scratch, data = system_calls.Scratch(64), os.urandom(40)
    with pytest.raises(BlockingIOError):
        scratch.receive(pair[1].fileno(), 64, 0)
    assert system_calls.send(pair[0].fileno(), data, 0) == 40
    assert scratch.receive(pair[1].fileno(), 64, 0) == 40
    assert scratch.view[:40] == data
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        system_calls.send(pair[0].fileno(), data, socket.MSG_NOSIGNAL)
    assert scratch.receive(pair[0].fileno(), 64, 0) == 0


def test_a_socket_that_is_full_takes_a_part_and_then_nothing(pair):
    data = bytes(32 << 20)
    assert 0 < system_calls.send(pair[0].fileno(), data, 0) < len(data)
    with pytest.raises(BlockingIOError):
        while True:
            system_calls.send(pair[0].fileno(), data, 0)


def test_a_pipe_wakes_until_it_was_read_and_may_be_full():
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    scratch = system_calls.Scratch(1 << 20)
    with select.epoll() as epoll:
        ready = system_calls.ReadyFiles(epoll.fileno())
        for _ in range(2):  # a file may be watched already
            ready.watch(read, select.EPOLLIN)
        assert ready.take() == []
        for _ in range(1 << 17):
            system_calls.write_byte(write)
        assert ready.take() == [(read, select.EPOLLIN)]
        scratch.read(read)
        assert ready.take() == []
        os.close(write)
        assert ready.take() == [(read, select.EPOLLHUP)]
        os.close(read)
        with pytest.raises(OSError, match="Bad file"):
            ready.watch(read, select.EPOLLIN)
