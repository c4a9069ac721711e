"""Items that a request holds may be copied behind it, and are stored as they were: whatever the
floor does, and whatever is written to them once the store has settled.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.store import Store
from disagg.store.transfer import writing
from kvpool.layout import RequestAddress
from tests import oracle
from tests.disagg.store.stores import CHUNK, fresh, got, slow
from tests.pools import hybrid, mha, swa
from tests.processes import until

TOKENS = 6 * CHUNK
PROMPT = np.random.default_rng(5).integers(0, 900, TOKENS)


def found(url, build, salt=0):
    """Whether a new pool reads what was written as `salt`."""
    pool = build(num_pages=40)
    address = oracle.place(pool, TOKENS, 2)
    oracle.blank(pool)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(PROMPT) == TOKENS
        assert got(store, PROMPT, address) is None
    return oracle.holds(pool, address, salt=salt)


def written(store):
    until(lambda: not store.stats().queued_bytes)


def test_nobody_waits_for_a_floor_that_hangs(monkeypatch):
    url, floor, pool = fresh(), slow(monkeypatch), mha(num_pages=40)
    address = oracle.filled(pool, TOKENS, 1)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        assert store.write(PROMPT, address, held=True) == 6
        store.settle()
        oracle.blank(pool)
        assert store.stats().queued_bytes
        floor.go.set()
        written(store)
    monkeypatch.undo()
    assert found(url, mha)


def windows(num_pages):
    return swa(num_pages=2 * num_pages, num_window_pages=2 * num_pages)


@pytest.mark.parametrize("build", [windows, hybrid])
def test_what_a_request_overwrites_is_copied_at_once(build):
    url, pool = fresh(), build(num_pages=40)
    table = oracle.place(pool, TOKENS, 1)
    overwritten = [
        oracle.state(pool).views[region.key]
        for region in pool.layout.regions
        if pool.layout.space_of(region).window is not None
        or pool.layout.space_of(region).per_request
    ]
    assert overwritten
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        for stop in range(CHUNK, TOKENS + 1, CHUNK):
            address = RequestAddress(stop, table.spans)
            oracle.write(pool, address, range(stop - CHUNK, stop))
            store.write(PROMPT[:stop], address, range(stop - CHUNK, stop), held=True)
            for view in overwritten:
                before = view.copy()
                view[:] = 255
                store.settle()
                view[:] = before
        written(store)
    assert found(url, build)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=2, max_size=6))
def test_requests_that_use_the_same_items_one_after_the_other(rounds):
    """Each ends, and the next overwrites its items, which is when the store settles."""
    url, pool = fresh(), mha(num_pages=40)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        for number, (chunks, held) in enumerate(rounds):
            store.settle()
            address = oracle.place(pool, chunks * CHUNK, 1)
            oracle.write(pool, address, range(chunks * CHUNK), salt=number)
            tokens = PROMPT[: chunks * CHUNK] + number
            assert store.write(tokens, address, held=held) == chunks
        written(store)
        for number, (chunks, _) in enumerate(rounds):
            address = oracle.place(pool, chunks * CHUNK, 3)
            store.settle()
            oracle.blank(pool)
            assert got(store, PROMPT[: chunks * CHUNK] + number, address) is None
            assert oracle.holds(pool, address, salt=number)


def test_a_store_that_closes_has_copied_all(monkeypatch):
    url, floor, pool = fresh(), slow(monkeypatch), mha(num_pages=40)
    monkeypatch.setattr("disagg.store.store.CLOSE_SECONDS", 0.1)
    address = oracle.filled(pool, TOKENS, 1)
    store = Store(url, pool.layout, chunk_tokens=CHUNK)
    store.write(PROMPT, address, held=True)
    store.close()
    oracle.blank(pool)
    floor.go.set()
    written(store)
    monkeypatch.undo()
    assert found(url, mha)


def test_settling_waits_for_a_copy_that_a_thread_makes(monkeypatch):
    url, pool, begun, go = fresh(), mha(num_pages=40), threading.Event(), threading.Event()
    address = oracle.filled(pool, TOKENS, 1)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        gather = writing.Staging.gather

        def slowly(*given):
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                assert go.wait(20)
            gather(*given)

        monkeypatch.setattr(writing.Staging, "gather", slowly)
        store.write(PROMPT, address, held=True)
        assert begun.wait(20)
        settling = threading.Thread(target=store.settle)
        settling.start()
        settling.join(0.1)
        assert settling.is_alive()
        go.set()
        settling.join(20)
        assert not settling.is_alive()
        oracle.blank(pool)
        written(store)
    assert found(url, mha)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (7, 1), (8, 2), (192, 4)])
def test_writers_leave_cores_to_the_engine(cores, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert writing.writer_threads() == threads
