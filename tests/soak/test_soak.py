"""A short soak run is right, and what is wrong or is kept is found: the checks are tested too."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from disagg.engines.local import LocalEngine
from tests.disagg.engines.peers import ENGINES
from tests.soak.__main__ import main, soak
from tests.soak.report import MIB, Report
from tests.soak.slices import LEAST, QUIET, RECONNECT, Limits, Sample, Slice, trends

KEPT_EVERY = 0.1
"""Seconds after which the next read leaves something behind, however many there are."""


@pytest.mark.parametrize(
    ("engine", "minutes", "memory"),
    [("local", 0.05, 64), *(pytest.param(name, 3, 4, marks=pytest.mark.long) for name in ENGINES)],
)
def test_a_run_passes_and_reports_what_it_did(tmp_path, capsys, engine, minutes, memory):
    options = ["--minutes", str(minutes), "--engines", engine, "--memory", str(memory)]
    faults = QUIET, RECONNECT, "restart decode", "abort by prefill"
    options += ["--families", "dsv4", "--out", str(tmp_path), "--faults", *faults]
    status = main(options)
    text, report = capsys.readouterr().out, json.loads((tmp_path / "soak.json").read_text())
    assert status == 0 and report["passed"], text
    (part,) = report["slices"]
    assert part["rooms"]["succeeded"] > 20 and part["prefix"]["hits"] > 0
    assert {*part["samples"]} == {"p0", "d0"}
    assert len(part["trends"]) == 8 and all(trend["flat"] for trend in part["trends"])
    assert (tmp_path / "soak.md").read_text() in text


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
    report, lines = Report(seed=0, minutes=seconds / 60), []
    part = Slice("local", "mha", seconds, 0, faults=(QUIET, RECONNECT), engines=engines)
    soak([part], report, Limits(memory=16 * MIB), lines.append)
    assert report.passed == (not report.failures)
    return report.failures


def test_what_a_process_keeps_is_found():
    failures = run(4, d0=Keeping)
    assert [sentence.partition(" grew ")[0] for sentence in failures] == [
        f"local mha: d0: {what}" for what in ("memory", "files", "threads")
    ]


class Flipping(LocalEngine):
    """Changes what it is told to read: some bytes are those of other entries."""

    def read(self, peer, batch):
        batch.src[0] += 16
        return super().read(peer, batch)


def test_wrong_bytes_are_found():
    (sentence,) = run(8, d1=Flipping)  # which does not compare checksums
    assert "wrong bytes" in sentence


@pytest.mark.parametrize("what", ["memory", "files", "threads", "items"])
def test_only_what_grows_after_the_first_quarter_by_more_than_its_limit_is_a_leak(what):
    flat = {"seconds": 0.0, "memory": 0, "files": 9, "threads": 2, "items": 0}
    series = [Sample(**{**flat, what: 100 if n < LEAST else n // LEAST}) for n in range(4 * LEAST)]
    limits = dict.fromkeys(("memory", "files", "threads", "items"), 2)
    assert all(trend.flat for trend in trends({"d0": series}, Limits(**limits)))
    (trend,) = (t for t in trends({"d0": series}, Limits(**{**limits, what: 1})) if not t.flat)
    assert (trend.what, trend.before, trend.after) == (what, 1, 3)


def test_a_run_with_too_few_samples_says_nothing():
    few = [Sample(seconds=0.0, memory=0, files=0, threads=0, items=0)] * (LEAST - 1)
    with pytest.raises(ValueError, match="11 samples, 12 are needed"):
        [*trends({"p0": few}, Limits(memory=0))]
