"""Prefix reuse: forms of tokens, events and refusals; test_prefix_stateful.py has what is kept."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvpool import Allocator, PrefixCache
from kvpool.prefix.chain import Chain, MediaSpan, token_ids
from kvpool.prefix.events import encode
from tests.pools import dsv4, hybrid, mla

PAGE = 4


def cached(pool=None, **options):
    options.setdefault("checkpoint_tokens", 8)
    pool = mla(device="meta") if pool is None else pool
    return Allocator(pool, prefix=PrefixCache(**options))


def serve(alloc, tokens, chunk=PAGE, **options):
    """A request of these tokens, stored in chunks."""
    request = alloc.new_request(tokens, **options)
    while (start := request.num_tokens) < len(tokens):
        alloc.extend(request, min(chunk, len(tokens) - start))
        alloc.store(request, tokens[start : request.num_tokens])
    return request


def left(alloc, tokens, **options):
    alloc.free(serve(alloc, tokens, **options))


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, lambda t: np.array(t, dtype=np.uint16), torch.tensor]
)
def test_tokens_of_any_form_are_the_same(form):
    alloc = cached()
    left(alloc, range(13))
    assert alloc.prefix.lookup(form(range(13))) == 12
    assert alloc.new_request(form([*range(9), 7, 7, 7])).num_tokens == 8


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (100, "tokens: the ids of the tokens, .* got 100. .* allocated by extend"),
        (None, "got None"),
        ("abc", "got 'abc'"),
        ([1.5], "a flat list of integers"),
        ([[1]], "a flat list of integers"),
        ([-1], "0 to 2"),
        ([1, 1 << 31], "0 to 2"),
        ([1, 1 << 70], "a flat list of integers"),
        ([1, 2.5], "a flat list of integers"),
        ([1, "2"], "a flat list of integers"),
        (np.uint64([1 << 63]), "0 to 2"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused_and_changes_nothing(tokens, says):
    alloc, plain = cached(), Allocator(mla(device="meta"))
    request = serve(alloc, range(8))
    alloc.extend(request, 4)
    calls = alloc.new_request, alloc.prefix.lookup, lambda t: alloc.store(request, t)
    for call in (*calls, plain.new_request):
        with pytest.raises(ValueError, match=f"tokens: .*{says.removeprefix('tokens: ')}"):
            call(tokens)
    assert (alloc.usage().requests, plain.usage().requests) == (1, 0)
    alloc.store(request, range(8, 12))
    assert alloc.prefix.lookup(range(12)) == 12
    alloc.check_integrity()


def test_more_tokens_than_the_request_has_are_refused():
    alloc = cached()
    request = serve(alloc, range(8))
    with pytest.raises(ValueError, match="12 are stored then, the request has 8"):
        alloc.store(request, range(4))


def test_without_a_cache_requests_begin_empty_and_store_nothing():
    alloc = Allocator(mla(device="meta"))
    left(alloc, range(8))
    assert alloc.new_request(range(8)).num_tokens == 0
    assert alloc.prefix is None


def test_a_prefix_is_unpinned_once():
    alloc = cached()
    alloc.prefix.unpin(pinned := alloc.prefix.pin(range(8)))
    with pytest.raises(ValueError, match="not pinned"):
        alloc.prefix.unpin(pinned)


def test_a_copy_that_fails_leaves_no_request():
    pool = hybrid(num_pages=12)
    alloc = cached(pool)
    left(alloc, range(8))
    free = alloc.usage().free

    def fail(*_):
        raise RuntimeError("device lost")

    pool.copy_items, copy = fail, pool.copy_items
    with pytest.raises(RuntimeError, match="device lost"):
        alloc.new_request(range(8))
    assert alloc.usage().free == free and alloc.usage().requests == 0
    alloc.check_integrity()
    pool.copy_items = copy
    assert alloc.new_request(range(8)).num_tokens == 8


def test_pages_and_checkpoints_must_end_together():
    with pytest.raises(ValueError, match="multiples of 8 tokens"):
        cached(dsv4(device="meta"), checkpoint_tokens=12)
    with pytest.raises(ValueError, match="1 or more"):
        PrefixCache(checkpoint_tokens=0)


def test_a_cache_serves_one_allocator():
    cache = PrefixCache()
    Allocator(mla(device="meta"), prefix=cache)
    with pytest.raises(ValueError, match="another allocator"):
        Allocator(mla(device="meta"), prefix=cache)


def hashes(salt, tokens, page=PAGE):
    """Of the salt, and of each whole page."""
    found = [blake2b(salt.encode(), digest_size=32).digest()]
    for at in range(0, len(tokens) - page + 1, page):
        raw = b"".join(t.to_bytes(4, "little") for t in tokens[at : at + page])
        found.append(blake2b(found[-1] + raw, digest_size=32).digest())
    return found


def test_events_are_what_vllm_publishes():
    """The bytes, decoded without our types, beside the fields of vllm/distributed/kv_events.py."""
    alloc = cached(mla(num_pages=4, device="meta"), events=True)
    left(alloc, [*range(300, 312)], chunk=8, salt="lora")
    left(alloc, [*range(400, 404)], chunk=8)
    raw = encode(alloc.prefix.take_events(), data_parallel_rank=3)
    _, events, rank = msgspec.msgpack.decode(raw)
    _, *pages = hashes("lora", [*range(300, 312)])
    same = {"block_size": PAGE, "lora_id": None, "medium": "GPU", "lora_name": None}
    same |= {"type": "BlockStored", "kv_cache_spec_kind": "full_attention"}
    of_group = {"group_idx": 0, "locality": "LOCAL"}
    tokens = [*range(300, 308)], [*range(308, 312)], [*range(400, 404)]

    def stored(pages, parent, ids, **more):
        named = {"block_hashes": pages, "parent_block_hash": parent, "token_ids": ids}
        return {**same, **of_group, **named, **more}

    assert rank == 3
    assert events == [
        stored(pages[:2], None, tokens[0], extra_keys=[["lora"]] * 2),
        stored(pages[2:], pages[1], tokens[1], extra_keys=[["lora"]]),
        {"type": "BlockRemoved", "block_hashes": pages[2:], "medium": "GPU", **of_group},
        stored(hashes("", tokens[2])[1:], None, tokens[2]),
    ]
    alloc.prefix.clear()
    _, events, _ = msgspec.msgpack.decode(encode(alloc.prefix.take_events()))
    assert events == [{"type": "AllBlocksCleared"}]
    with pytest.raises(ValueError, match="events=True"):
        cached().prefix.take_events()


@pytest.mark.parametrize(("received", "found"), [(0, 8), (9, 8), (10, 0), (12, 0)])
def test_a_page_whose_ring_was_dead_when_it_was_received_is_not_kept(received, found):
    """The first page is in the window of 12 tokens, but of its ring only the last two of 8 would
    be read: they come with 8 or 9 tokens.
    """
    pool = dsv4(layers=[1], page_rings=True, window=12, window_page_size=8, device="meta")
    alloc = cached(pool)
    request = alloc.new_request()
    alloc.extend(request, received or 12, received=received > 0)
    alloc.store(request, range(request.num_tokens))
    assert alloc.prefix.lookup(range(12)) == found


TOKENS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=30)


@settings(max_examples=150)
@given(TOKENS, st.lists(st.tuples(st.integers(0, 30), TOKENS), max_size=5), st.integers(1, 7))
def test_a_chain_has_the_keys_of_its_tokens_however_they_came(tokens, steps, page):
    chain = Chain(page)
    chain.append(token_ids(np.array(tokens, dtype=np.int64)))
    for left, more in [(30, []), *steps]:
        chain.truncate(left)
        chain.append(token_ids(np.array(more, dtype=np.int64)))
        tokens = [*tokens[:left], *more]
        expected = hashes("", tokens, page)[1:]
        assert (chain.tokens.tolist(), chain.keys) == (tokens, expected)
        assert len({*expected}) == len(expected)


def picture(start, stop, number=1):
    return MediaSpan(range(start, stop), number.to_bytes(32, "little"))


def test_equal_tokens_with_other_pictures_share_what_is_before_them():
    alloc = cached()
    prompt = [1, 2, 3, 4, 5, *[9] * 6, 6, 7, 8, 9, 10]
    left(alloc, prompt, media=[picture(5, 11)])
    for media, found in (
        ([picture(5, 11)], 16),
        ([picture(5, 11, number=2)], 4),
        ([picture(5, 10)], 4),
        ([picture(6, 11)], 4),
        ([picture(5, 11), picture(12, 13, number=2)], 12),
        ([picture(5, 11), picture(16, 17, number=2)], 16),
        ([], 4),
    ):
        assert alloc.prefix.lookup(prompt, media=media) == found
        request = alloc.new_request(prompt, media=media)
        assert request.num_tokens == found
        alloc.free(request)
    pinned = alloc.prefix.pin(prompt, media=[picture(5, 11)])
    assert pinned.num_tokens == 16
    assert alloc.prefix.lookup(prompt, media=[picture(5, 11)], salt="tenant") == 0


def test_events_say_which_pictures_stand_where():
    alloc = cached(events=True)
    left(alloc, [9] * 12, media=[picture(2, 6), picture(3, 4, number=2)], salt="lora")
    left(alloc, [9] * 8, media=[picture(5, 6)])
    raw = encode(alloc.prefix.take_events())
    stored = [e for e in msgspec.msgpack.decode(raw)[1] if e["type"] == "BlockStored"]
    one, two = (picture(0, 1, number).digest.hex() for number in (1, 2))
    extra = [keys for event in stored for keys in event["extra_keys"]]
    assert extra == [["lora", [one, 2], [two, 3]], ["lora", [one, -2]], ["lora"], None, [[one, 1]]]


@pytest.mark.parametrize(
    ("positions", "digest", "says"),
    [
        (range(3, 3), b"d" * 32, "one at least"),
        (range(-1, 3), b"d" * 32, "from 0 on"),
        (range(0, 9, 2), b"d" * 32, "got range"),
        (range(9), b"d" * 31, "32 bytes, got 31"),
    ],
)
def test_what_is_no_picture_in_a_prompt_is_refused(positions, digest, says):
    with pytest.raises(ValueError, match=says):
        MediaSpan(positions, digest)


SPANS = st.lists(
    st.builds(
        lambda start, length, number: (start, start + length, number.to_bytes(32, "little")),
        st.integers(0, 30),
        st.integers(1, 30),
        st.sampled_from([0, 1, 2**31 - 1, 2**40]),
    ),
    max_size=4,
)


def hashed(before, tokens, start, spans):
    """What is hashed of a page that begins at `start`, and with what, as documented."""
    raw = b"".join(t.to_bytes(4, "little") for t in tokens)
    there = [s for s in sorted(spans) if s[0] < start + len(tokens) and s[1] > start]
    if not there:
        return before + raw, b""
    said = b"".join(
        (first - start).to_bytes(8, "little", signed=True)
        + (stop - first).to_bytes(8, "little")
        + digest
        for first, stop, digest in there
    )
    return before + len(there).to_bytes(8, "little") + said + raw, b"media"


def meant(data, person):
    """What was hashed: the key before, spans counted from the page's start, tokens."""
    before, rest, spans = data[:32], data[32:], []
    if person:
        count, rest = int.from_bytes(rest[:8], "little"), rest[8:]
        for _ in range(count):
            first = int.from_bytes(rest[:8], "little", signed=True)
            spans.append((first, int.from_bytes(rest[8:16], "little"), rest[16:48]))
            rest = rest[48:]
    tokens = [int.from_bytes(rest[n : n + 4], "little") for n in range(0, len(rest), 4)]
    return before, spans, tokens


@settings(max_examples=300)
@given(TOKENS, SPANS, st.integers(1, 7), st.integers(0, 30), TOKENS)
def test_keys_are_of_pictures_and_tokens_and_nothing_reads_as_another(
    tokens, spans, page, left, more
):
    media = [MediaSpan(range(start, stop), digest) for start, stop, digest in spans]
    chain = Chain(page, "salt", media[::-1])
    chain.append(token_ids(np.array(tokens, dtype=np.int64)))
    chain.truncate(left)
    chain.append(token_ids(np.array(more, dtype=np.int64)))
    tokens = [*tokens[:left], *more]
    (before,) = hashes("salt", [])
    for number, key in enumerate(chain.keys):
        start = number * page
        data, person = hashed(before, tokens[start : start + page], start, spans)
        assert key == blake2b(data, digest_size=32, person=person).digest()
        there = sorted(s for s in spans if s[0] < start + page and s[1] > start)
        relative = [(first - start, stop - first, digest) for first, stop, digest in there]
        assert meant(data, person) == (before, relative, tokens[start : start + page])
        before = key


@settings(max_examples=150)
@given(SPANS, st.integers(1, 7))
def test_no_tokens_have_the_key_of_tokens_with_pictures(spans, page):
    """The very bytes that are hashed, as tokens of another page size."""
    data, person = hashed(hashes("", [])[0], [1] * page, 0, spans)
    words = [int.from_bytes(data[n : n + 4], "little") for n in range(32, len(data), 4)]
    chain = Chain(page, "", [MediaSpan(range(start, stop), d) for start, stop, d in spans])
    chain.append(token_ids([1] * page))
    assert (chain.keys == hashes("", words, len(words))[1:]) == (not person)
