"""Signal handlers that wait for the end of a change."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from disagg.host.signals import deferred_signals

ALARM, USER = signal.SIGALRM, signal.SIGUSR1
TRIALS = 300


class Alarm(Exception):
    """Of a handler."""


@pytest.fixture
def calls():
    """Numbers of the signals that were handled; handlers are put back afterwards."""
    seen, before = [], {each: signal.getsignal(each) for each in (ALARM, USER, signal.SIGINT)}
    for number in (ALARM, USER):
        signal.signal(number, lambda number, frame: seen.append(number))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_when_the_change_is_complete(calls):
    with deferred_signals:
        with deferred_signals:
            signal.raise_signal(ALARM)
        signal.raise_signal(USER)
        assert calls == []
    assert calls == [ALARM, USER]


def test_every_handler_is_back_afterwards_and_one_that_was_set_meanwhile_stays(calls):
    alarm, user, new = signal.getsignal(ALARM), signal.getsignal(USER), lambda *_: None
    with deferred_signals:
        assert signal.getsignal(ALARM) is not alarm
        signal.signal(USER, new)
    assert (signal.getsignal(ALARM), signal.getsignal(USER)) == (alarm, new)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert user is not new


def test_what_handlers_raise_reaches_the_caller_after_all_have_run(calls):
    def raises(number, frame):
        calls.append(number)
        raise Alarm(number)

    signal.signal(ALARM, raises)
    with pytest.raises(Alarm), deferred_signals:
        signal.raise_signal(ALARM)
        signal.raise_signal(USER)
        calls.append("done")
    assert calls == ["done", ALARM, USER]
    assert signal.getsignal(ALARM) is raises
    with pytest.raises(KeyboardInterrupt), deferred_signals:
        signal.raise_signal(signal.SIGINT)


def test_a_change_is_whole_or_not_made_whenever_the_signal_comes(calls, request):
    """Also while handlers are replaced or restored."""

    def raises(number, frame):
        raise Alarm

    signal.signal(ALARM, raises)
    state, chance = [0, 0], random.Random(5)
    # an exception of a handler that runs in a callback of the collector reaches nobody
    gc.disable()
    request.addfinalizer(gc.enable)
    for _ in range(TRIALS):
        with pytest.raises(Alarm):
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 5e-5))
            while True:
                with deferred_signals:
                    state[0] += 1
                    state[1] += 1
        assert state[0] == state[1]
        assert signal.getsignal(ALARM) is raises
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_siginterrupt_said_stays(calls):
    """A read in C that a signal does not interrupt."""
    probe = """
import ctypes, os, signal, threading, time
from disagg.host.signals import deferred_signals

signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
with deferred_signals:
    pass
read, write = os.pipe()
threading.Thread(target=lambda: (time.sleep(0.3), os.write(write, b"x")), daemon=True).start()
signal.setitimer(signal.ITIMER_REAL, 0.05)
print(ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1))
"""
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["1"], ran


def test_other_threads_defer_nothing(calls):
    inside, handled = threading.Event(), threading.Event()

    def other():
        with deferred_signals:
            inside.set()
            assert handled.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    signal.raise_signal(ALARM)
    assert calls == [ALARM]
    handled.set()
    thread.join(20)


def test_a_child_that_another_thread_forks_during_a_change_has_its_own_handlers(calls):
    alarm, statuses = signal.getsignal(ALARM), []

    def fork():
        child = os.fork()
        if child == 0:
            signal.raise_signal(ALARM)
            os._exit(7 if calls == [ALARM] and signal.getsignal(ALARM) is alarm else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with deferred_signals:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(20)
    assert statuses == [7]
