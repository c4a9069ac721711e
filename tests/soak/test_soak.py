"""A short soak run is right, and what is wrong or is kept is found: the checks are tested too."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

from disagg.engines.local import LocalEngine
from tests.disagg.engines.peers import ENGINES
from tests.soak.__main__ import main, soak
from tests.soak.slices import LEAST, LIMITS, MIB, QUIET, RECONNECT, Slice, leaks

KEPT_EVERY = 0.1
"""Seconds after which the next read leaves something behind, however many there are."""


@pytest.mark.parametrize(
    ("engine", "minutes", "memory"),
    [("local", 0.05, 64), *(pytest.param(name, 3, 4, marks=pytest.mark.long) for name in ENGINES)],
)
def test_a_run_passes_and_says_what_it_did(capsys, engine, minutes, memory):
    options = ["--minutes", str(minutes), "--engines", engine, "--memory", str(memory)]
    faults = QUIET, RECONNECT, "restart decode", "abort by prefill"
    status = main([*options, "--families", "dsv4", "--faults", *faults])
    text = capsys.readouterr().out
    assert status == 0 and text.endswith(" minutes, 0 problems\n"), text
    *_, rounds = re.findall(r"([\d,]+) rooms succeeded, .* ([\d,]+) reused prefixes", text)
    assert int(rounds[0].replace(",", "")) > 20 and rounds[1] != "0"
    for process in ("p0", "d0"):
        assert re.search(rf"dsv4: {process}: memory .*, files .*, threads .*, items 0 to 0\n", text)


class Keeping(LocalEngine):
    """Keeps memory, a file and a thread."""

    def __init__(self):
        super().__init__()
        self.next, self.kept = 0.0, []

    def read(self, peer, batch):
        now = time.monotonic()
        if now >= self.next:
            self.next = now + KEPT_EVERY
            self.kept.append(bytearray(b"x") * (4 * MIB))
            os.open(os.devnull, os.O_RDONLY)
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().read(peer, batch)


def run(seconds, **engines):
    """Failures of a run in which no process ends."""
    part = Slice("local", "mha", seconds, 0, faults=(QUIET, RECONNECT), engines=engines)
    return soak(part, {**LIMITS, "memory": 16 * MIB})


def test_what_a_process_keeps_is_found():
    failures = run(4, d0=Keeping)
    assert [sentence.partition(" grew ")[0] for sentence in failures] == [
        f"d0: {what}" for what in ("memory", "files", "threads")
    ]


@pytest.mark.parametrize("what", LIMITS)
def test_only_what_grows_after_the_first_quarter_by_more_than_its_limit_is_a_leak(what):
    flat = {"memory": 0, "files": 9, "threads": 2, "items": 0}
    series = [{**flat, what: 100 if n < LEAST else n // LEAST} for n in range(4 * LEAST)]
    limits = dict.fromkeys(LIMITS, 2)
    assert not [*leaks(series, limits)]
    assert [*leaks(series, {**limits, what: 1})] == [f"{what} grew from 1 to 3, by more than 1"]


def test_a_run_with_too_few_samples_says_nothing():
    few = [dict.fromkeys(LIMITS, 0)] * (LEAST - 1)
    with pytest.raises(ValueError, match="11 samples, 12 are needed"):
        [*leaks(few, LIMITS)]
