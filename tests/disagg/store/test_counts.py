"""Each lookup and each read ends once and counts once, whatever becomes of it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from disagg.store import ChunkKeys, DeferredAddress, Hit, Store
from disagg.store.outage import PAUSE_SECONDS
from kvpool.layout import RequestAddress, Span
from tests import oracle
from tests.disagg.store.stores import CHUNK, fresh, got, outcome, put, slow
from tests.pools import mha
from tests.processes import until

TOKENS = 3 * CHUNK
PROMPT = np.random.default_rng(44).integers(0, 1000, TOKENS)
LOOKUPS = "hit", "miss", "away", "unreachable"
READS = "read", "aborted", "late", "damaged", "vanished", "refused"


@pytest.fixture
def stored():
    """The URL of a floor with the prompt."""
    url, pool = fresh(), mha(num_pages=40)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        put(store, PROMPT, oracle.filled(pool, TOKENS))
        yield url


def counted(store, outcomes):
    counts = store.stats().counts
    return {name: counts[name] for name in outcomes if counts[name]}


def test_a_read_that_looks_up_by_itself_is_no_lookup(stored):
    pool = mha(num_pages=40)
    address = oracle.place(pool, TOKENS, 3)
    with Store(stored, pool.layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(PROMPT) == TOKENS
        assert got(store, PROMPT, address) is None
        assert "has 0 tokens of" in got(store, PROMPT[::-1], address)
        assert counted(store, LOOKUPS) == {"hit": 1}
        assert counted(store, READS) == {"read": 1, "vanished": 1}
        assert store.stats().tokens["hit"] == TOKENS


def test_what_ends_after_it_was_late_counts_as_late_only(stored, monkeypatch):
    floor, pool = slow(monkeypatch), mha(num_pages=40)
    address = oracle.place(pool, TOKENS, 3)
    with Store(stored, pool.layout, chunk_tokens=CHUNK, timeout=0.05) as store:
        lookup, read = store.ask(PROMPT), store.read(PROMPT, address)
        time.sleep(0.06)
        assert {ended.job for ended in store.ended()} == {lookup, read}
        floor.go.set()
        until(lambda: store.lookup(PROMPT) == TOKENS)
        counts = store.stats().counts
        assert counts["unreachable"] == counts["late"] == counts["hit"] == 1
        assert store.stats().tokens["unreachable"] == TOKENS
        assert counts["read"] == 0 and counts["miss"] == 0
        store.timeout = 10.0
        assert got(store, PROMPT, address) is None


def test_a_read_that_is_aborted_counts_as_such(stored, monkeypatch):
    floor, pool = slow(monkeypatch), mha(num_pages=40)
    with Store(stored, pool.layout, chunk_tokens=CHUNK) as store:
        for _ in range(3):
            read = store.read(PROMPT, oracle.place(pool, TOKENS, 3))
        store.abort(read)
        store.abort(read)
        assert counted(store, READS) == {"aborted": 1}
        assert store.stats().tokens["aborted"] == TOKENS
        floor.go.set()
    assert sum(counted(store, READS).values()) == 3


def test_a_hit_of_other_tokens_than_are_read_is_refused(stored):
    """Of a shorter prefix other windows and states are needed."""
    pool = mha(num_pages=40)
    with Store(stored, pool.layout, chunk_tokens=CHUNK) as store:
        hit = outcome(store, store.ask(PROMPT)).hit
        for other in (hit, Hit(CHUNK, hit.sources[:1])):
            address = oracle.place(pool, 2 * CHUNK, 3)
            with pytest.raises(ValueError, match=r"^hit: of \d+ tokens, and 48 are to be read"):
                store.read(PROMPT, address, hit=other)
        assert store.ended() == []


def test_what_a_thread_of_the_store_makes_is_read_as_what_its_caller_has_made(stored):
    """And made once, by another thread than the caller's."""
    pool, makers = mha(num_pages=40), []
    address = oracle.place(pool, TOKENS, 3)

    def make():
        makers.append(threading.current_thread())
        return address

    with Store(stored, pool.layout, chunk_tokens=CHUNK) as store:
        keys = ChunkKeys.when_needed(3, lambda: store.keys(PROMPT).keys)
        hit = outcome(store, store.ask(keys)).hit
        assert hit.tokens == TOKENS
        oracle.blank(pool)
        read = store.read(keys, DeferredAddress(TOKENS, make), range(TOKENS), hit=hit)
        assert outcome(store, read).failure is None
    oracle.assert_holds(pool, address)
    assert len(makers) == 1 and makers[0] is not threading.current_thread()


def test_what_cannot_be_made_ends_what_needs_it(stored):
    pool, wrong = mha(num_pages=40), "tokens: 0 to 2**31 - 1, got -1."
    address = oracle.place(pool, TOKENS, 3)
    with Store(stored, pool.layout, chunk_tokens=CHUNK) as store:
        keys = ChunkKeys.when_needed(3, lambda: store.keys([-1] * TOKENS).keys)
        assert store.lookup(keys) == 0
        assert store.stats().reasons["miss"] == wrong
        assert got(store, keys, address) == wrong
        twice = DeferredAddress(TOKENS, lambda: RequestAddress(TOKENS, {"kv": Span([1, 1])}))
        assert got(store, PROMPT, twice) == "span ids: item 1 is listed twice."
        assert counted(store, LOOKUPS) == {"miss": 1}
        assert counted(store, READS) == {"refused": 2}


def test_a_prompt_of_no_chunk_is_a_miss_that_asks_nobody(stored, monkeypatch):
    floor, pool = slow(monkeypatch), mha(num_pages=40)
    with Store(stored, pool.layout, chunk_tokens=CHUNK, timeout=0.05) as store:
        assert store.lookup(PROMPT) == 0
        assert store.lookup(PROMPT[: CHUNK - 1]) == 0
        assert outcome(store, store.ask(PROMPT)).failure == f"{stored} does not answer."
        assert counted(store, LOOKUPS) == {"unreachable": 1, "miss": 1, "away": 1}
        floor.go.set()


def test_while_a_floor_hangs_one_request_at_a_time_waits_for_it(stored, monkeypatch):
    """And little piles up behind the threads that hang."""
    floor, pool = slow(monkeypatch), mha(num_pages=40)
    pauses = PAUSE_SECONDS / 100
    monkeypatch.setattr("disagg.store.outage.PAUSE_SECONDS", pauses)
    monkeypatch.setattr("disagg.store.outage.MOST_PAUSE_SECONDS", pauses)
    with Store(stored, pool.layout, chunk_tokens=CHUNK, timeout=0.05) as store:
        assert store.lookup(PROMPT) == 0
        ends = []
        for _ in range(50):
            jobs = [store.ask(PROMPT) for _ in range(20)]
            failures = [store.wait(job).failure for job in jobs]
            ends.append(failures.count(f"{stored} did not answer within 0.05 s."))
            assert failures.count(f"{stored} does not answer.") == 20 - ends[-1]
            time.sleep(pauses)
        assert max(ends) == 1 and sum(ends) > 1
        assert counted(store, LOOKUPS) == {"unreachable": 1 + sum(ends), "away": 1000 - sum(ends)}
        floor.go.set()
        until(lambda: store.lookup(PROMPT) == TOKENS)
