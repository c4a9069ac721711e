"""Runs that are copied outside Python: which bytes, and that no Python is needed meanwhile."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import socket
import time

import numpy as np
import pytest

from kvpool import _native
from tests.gil import gil_held

MANY = 2500
"""More runs than the kernel takes at once."""


@pytest.fixture
def worker():
    made = _native.Worker()
    yield made
    made.close()


@pytest.fixture
def link():
    """A connection to this process."""
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def end(job):
    until = time.monotonic() + 60
    while not job.ended:
        assert time.monotonic() < until
    return job


def case(widths, count, seed=0):
    """Source and destination arrays, columns of runs in random order, and the expected bytes."""
    random = np.random.default_rng(seed)
    lengths = random.choice(widths, count).astype(np.int64)
    source = random.integers(0, 256, int(lengths.sum()) + 8 * count, dtype=np.uint8)
    dest = np.full(source.size, 7, dtype=np.uint8)
    order = random.permutation(count)
    src = np.zeros(count, dtype=np.int64)
    src[order] = np.cumsum(lengths[order]) - lengths[order]
    dst = np.cumsum(lengths) - lengths + 8 * np.arange(count)
    expected = dest.copy()
    for start, stop, length in zip(src, dst, lengths):
        expected[stop : stop + length] = source[start : start + length]
    return source, dest, (source.ctypes.data + src, dest.ctypes.data + dst, lengths), expected


WIDTHS = [[0, 1, 3, 8, 1000], [4096], [0, 9_000_001], [0, 1, 63, 64, 127, 511, 513, 9000]]
"""The last two are more than what is read from the caches, and go past them."""


@pytest.mark.parametrize("way", ["call", "thread", "kernel"])
@pytest.mark.parametrize(("widths", "count"), [*zip(WIDTHS, [MANY, 64, 5, MANY])])
def test_runs_arrive_and_nothing_else_changes(worker, link, way, widths, count):
    source, dest, runs, expected = case(widths, count)
    if way == "call":
        assert _native.copy(*runs)
    elif way == "thread":
        assert end(worker.post(*runs)).done
    else:
        assert end(worker.post(*runs, pid=os.getpid(), peer=link[0].fileno())).done
    assert np.array_equal(dest, expected)
    del source


def test_columns_of_any_step_are_taken_as_they_are(worker):
    source, dest, (src, dst, _), expected = case([16], 300)
    rows = np.stack([src, dst], axis=1)
    one_number = np.broadcast_to(np.int64(16), 300)
    assert _native.copy(rows[::-1, 0], rows[::-1, 1], one_number)
    assert np.array_equal(dest, expected)
    with pytest.raises(ValueError, match=r"shapes \(300,\), \(299,\), \(300,\): \[N\] each"):
        worker.post(src, dst[1:], one_number)
    del source  # what pointers point to must stay until here


def test_a_job_lands_and_is_told_while_one_thread_keeps_the_gil():
    read, write = os.pipe()
    os.set_blocking(write, False)
    worker = _native.Worker(write)
    source, dest, runs, expected = case([1 << 16], 64)
    last, old = ctypes.c_ubyte.from_address(int(runs[1][-1])), int(dest[-9])
    assert old == 7 or expected[-9] != 7
    with gil_held():
        job = worker.post(*runs)
        until = time.monotonic() + 60  # which keeps the GIL, as all of this does
        while not job.ended and time.monotonic() < until:
            pass
        assert job.done and last.value == expected[int(runs[1][-1]) - dest.ctypes.data]
    assert np.array_equal(dest, expected)
    assert os.read(read, 8) == b"\0"
    worker.close()
    os.close(read)
    os.close(write)
    del source


def test_a_pointer_that_cannot_be_read_is_an_error_and_what_came_before_has_arrived(worker, link):
    source, dest, (src, dst, lengths), expected = case([64], MANY)
    src[MANY // 2 :] = 4096  # where nothing lies
    job = end(worker.post(src, dst, lengths, pid=os.getpid(), peer=link[0].fileno()))
    assert (job.done, job.cancelled, job.error) == (False, False, errno.EFAULT)
    half = int(dst[MANY // 2]) - dest.ctypes.data
    assert np.array_equal(dest[:half], expected[:half])
    assert (dest[half:] == 7).all()
    del source


@pytest.mark.parametrize("sign", ["hangs up", "speaks"])
def test_a_process_is_not_read_once_its_connection_shows_its_end(worker, link, sign):
    source, dest, runs, _ = case([64], 10)
    if sign == "hangs up":
        link[1].close()
    else:
        link[1].send(b"x")
    job = end(worker.post(*runs, pid=os.getpid(), peer=link[0].fileno()))
    assert (job.done, job.error) == (False, _native.PEER_ENDED)
    assert (dest == 7).all()
    del source


def test_a_cancelled_job_ends_and_writes_nothing_more(worker):
    long, short = case([1 << 20], 64), case([64], 10)
    first, second = worker.post(*long[2]), worker.post(*short[2])
    second.cancel()
    first.cancel()
    assert end(second).cancelled and not second.done
    assert end(first).ended
    assert (short[1] == 7).all()


def test_a_worker_that_nobody_closed_ends_before_its_memory_is_given_back():
    given = case([1 << 20], 64)
    threads = len(os.listdir("/proc/self/task"))
    worker = _native.Worker()
    job = worker.post(*given[2])
    del worker
    gc.collect()
    assert job.ended and len(os.listdir("/proc/self/task")) == threads


def test_without_the_compiled_file_the_reason_is_said(monkeypatch):
    monkeypatch.setenv("KVPOOL_NATIVE", "0")
    assert _native.availability() == "turned off by KVPOOL_NATIVE=0."
    none = np.zeros(0, dtype=np.int64)
    assert not _native.copy(none, none, none)
    with pytest.raises(RuntimeError, match="turned off by KVPOOL_NATIVE=0"):
        _native.Worker()
