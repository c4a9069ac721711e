"""Memory that is lent in pieces: disjoint, bounded, and at rest after an uncertain transfer."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest

from disagg.store.floors import staging as module
from disagg.store.floors.base import FloorError
from disagg.store.floors.staging import LentStaging


def test_pieces_never_overlap_and_all_come_back():
    staging, numbers = LentStaging(1 << 16), np.random.default_rng(0)
    places = []
    for _ in range(300):
        with ExitStack() as stack:
            spans = []
            for size in numbers.integers(1, 6000, 8).tolist():
                piece = stack.enter_context(staging.lent(size, "test"))
                assert piece.memory.size == size
                assert piece.memory.ctypes.data == piece.address and piece.address % 64 == 0
                spans.append((piece.address, piece.address + size))
            spans.sort()
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            places += spans
    assert staging.address <= min(places)[0] and max(places)[1] <= staging.address + staging.nbytes
    with staging.lent(staging.nbytes, "test") as piece:
        assert piece.memory.size == 1 << 16


def test_what_can_never_be_lent_is_refused_with_the_size_that_would_do():
    with (
        pytest.raises(FloorError, match=r"test: 3,145,728 bytes at once.*staging=3MiB or more"),
        LentStaging(1 << 20).lent(3 << 20, "test"),
    ):
        pass


def test_a_call_waits_for_memory_that_another_gives_back():
    staging, order, lent = LentStaging(4096), [], threading.Event()

    def wait():
        lent.wait(10)
        with staging.lent(1000, "second"):
            order.append("second")

    thread = threading.Thread(target=wait)
    thread.start()
    with staging.lent(4000, "first"):
        lent.set()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_memory_of_an_uncertain_transfer_rests(monkeypatch):
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    staging = LentStaging(4096)
    with staging.lent(1024, "test") as piece:
        piece.uncertain = True
        address = piece.address
    with staging.lent(3072, "test") as piece:
        assert not address <= piece.address < address + 1024
        with pytest.raises(FloorError, match="1,024 rest"), staging.lent(64, "test"):
            pass


def test_memory_that_rested_is_lent_again(monkeypatch):
    monkeypatch.setattr(module, "QUARANTINE_SECONDS", 0.1)
    staging = LentStaging(4096)
    with staging.lent(4096, "test") as piece:
        piece.uncertain = True
    monkeypatch.setattr(module, "WAIT_SECONDS", 5)
    with staging.lent(4096, "test"):
        pass
