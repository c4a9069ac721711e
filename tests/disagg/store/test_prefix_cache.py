"""`PrefixCache(store=...)`: what one process has computed, another goes on with."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.store import Store
from kvpool import Allocator, PrefixCache
from kvpool.prefix.chain import MediaSpan
from tests import oracle
from tests.disagg.store.stores import CHUNK, fresh
from tests.pools import CLASSES
from tests.processes import until

ROOM = {"num_pages": 60, "num_window_pages": 60}
PROMPT = np.random.default_rng(3).integers(0, 500, 5 * CHUNK + 7)


def runner(build, url, **more):
    """A pool with an allocator whose prefix cache has a store."""
    pool = build.but(**ROOM)(**more)
    store = Store(url, pool.layout, chunk_tokens=CHUNK)
    return pool, store, Allocator(pool, prefix=PrefixCache(checkpoint_tokens=CHUNK, store=store))


def computed(pool, alloc, request, tokens, salt=0):
    """Computes the rest of a prompt, in chunks, as the oracle says, and stores it."""
    while (start := request.num_tokens) < len(tokens):
        stop = min(len(tokens), (start // CHUNK + 1) * CHUNK)
        alloc.extend(request, stop - start)
        oracle.write(pool, request.address(), range(start, stop), salt)
        alloc.store(request, tokens[start:stop])


@pytest.mark.parametrize("build", CLASSES.values(), ids=CLASSES)
def test_another_process_goes_on_where_one_has_written(build):
    url = fresh()
    pool, store, alloc = runner(build, url)
    request = alloc.new_request(PROMPT)
    assert request.num_tokens == 0
    computed(pool, alloc, request, PROMPT)
    store.close()
    pool, store, alloc = runner(build, url)
    oracle.blank(pool)
    request = alloc.new_request([*PROMPT[:-3], 7, 7])
    assert request.num_tokens == 5 * CHUNK
    assert oracle.holds(pool, request.address())
    alloc.free(request)
    again = alloc.new_request(PROMPT)
    assert again.num_tokens == 5 * CHUNK
    assert oracle.holds(pool, again.address())
    if build is CLASSES["mha"]:  # of rings, what was dead when it was read is read again
        assert store.stats().counts["read"] == 1
    other = alloc.new_request(PROMPT, salt="another tenant")
    assert other.num_tokens == 0
    alloc.check_integrity()
    store.close()


def test_what_cannot_be_read_is_computed(tmp_path):
    url = f"file://{tmp_path}"
    pool, store, alloc = runner(CLASSES["mha"], url)
    computed(pool, alloc, alloc.new_request(PROMPT), PROMPT)
    store.close()
    path = next(tmp_path.rglob("*.full"))
    path.write_bytes(path.read_bytes()[:-1])
    pool, store, alloc = runner(CLASSES["mha"], url)
    request = alloc.new_request(PROMPT)
    assert request.num_tokens == 0
    assert store.stats().counts["damaged"] == 1
    computed(pool, alloc, request, PROMPT, salt=1)
    store.close()
    pool, store, alloc = runner(CLASSES["mha"], url)  # what was damaged was written again
    assert store.lookup(PROMPT) == 5 * CHUNK
    assert alloc.new_request(PROMPT).num_tokens == 5 * CHUNK
    alloc.check_integrity()
    store.close()


def test_of_what_the_pool_has_the_store_is_not_asked():
    pool, store, alloc = runner(CLASSES["mha"], fresh())
    request = alloc.new_request(PROMPT)
    computed(pool, alloc, request, PROMPT)
    alloc.free(request)
    until(lambda: not store.stats().queued_bytes)
    assert alloc.new_request(PROMPT).num_tokens == 5 * CHUNK + 4  # pages of four
    counts = store.stats().counts
    assert counts["miss"] == 1 and counts["hit"] == counts["read"] == 0
    assert alloc.new_request([*PROMPT, *range(CHUNK)]).num_tokens == 5 * CHUNK + 4
    assert store.stats().counts["hit"] == 1 and store.stats().counts["read"] == 0
    store.close()


def test_a_prefix_for_which_there_are_no_pages_is_computed():
    url = fresh()
    pool, store, alloc = runner(CLASSES["mha"], url)
    computed(pool, alloc, alloc.new_request(PROMPT), PROMPT)
    store.close()
    pool = CLASSES["mha"].but(num_pages=8)()
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        alloc = Allocator(pool, prefix=PrefixCache(store=store))
        assert alloc.new_request(PROMPT).num_tokens == 0
        assert alloc.usage().used["kv"] == 0


def test_another_process_goes_on_where_the_pictures_are_the_same():
    url = fresh()
    one, two = ([MediaSpan(range(CHUNK, 90), bytes([n] * 32))] for n in (1, 2))
    pool, store, alloc = runner(CLASSES["mha"], url)
    computed(pool, alloc, alloc.new_request(PROMPT, media=one), PROMPT, salt=1)
    computed(pool, alloc, alloc.new_request(PROMPT, media=two), PROMPT, salt=2)
    store.close()
    for media, tokens, salt in ((one, 5 * CHUNK, 1), (two, 5 * CHUNK, 2), ([], CHUNK, 1)):
        pool, store, alloc = runner(CLASSES["mha"], url)
        oracle.blank(pool)
        begin = alloc.new_request(PROMPT[:CHUNK], media=media)
        assert begin.num_tokens == CHUNK
        assert oracle.holds(pool, begin.address(), salt=1)  # before the pictures
        request = alloc.new_request(PROMPT, media=media)
        assert request.num_tokens == tokens
        oracle.write(pool, request.address(), range(CHUNK), salt)
        assert oracle.holds(pool, request.address(), salt=salt)
        store.close()
