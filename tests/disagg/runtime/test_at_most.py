"""Whatever ranks hold and however they send it, what comes is right byte by byte; also in rooms
whose number of tokens only prefill knows, for which decode has pages of at most so many.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from disagg import DecodeEndpoint, KVPoll, RoomError
from disagg.engines.base import create_engine
from kvpool import Allocator, PrefixCache, RequestAddress, RequestPinned, Shard, Span
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.plan.test_packed import cache
from tests.disagg.runtime.sides import connected, succeeds, turn, turned
from tests.disagg.runtime.test_ranks import interleaved
from tests.disagg.test_matrix import other_pages
from tests.pools import CLASSES, PACKED, dsv4, hybrid, mla, swa

TOKENS, ROOM = 21, 30
MANY = {"num_pages": 14, "num_window_pages": 24, "num_slots": 9}
LAYERS = range(4)


SHAPES = {
    "equal": lambda build: ([build], [build]),
    "pages": lambda build: ([build], [other_pages(build)]),
    "TP down": lambda build: ([build.but(shard=Shard(r, 2)) for r in range(2)], [build]),
    "TP up": lambda build: ([build], [build.but(shard=Shard(r, 2)) for r in range(2)]),
    "PP": lambda build: (
        [build.but(layers=part, total_kv_layers=4) for part in (range(3), range(3, 4))],
        [build.but(placement="page")],
    ),
}


@pytest.mark.parametrize(
    ("pool", "shape"),
    [("mha", "equal"), ("swa", "pages"), ("nsa", "TP up"), ("hybrid", "TP down"), ("dsv4", "PP")],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_of_unknown_length_comes_whole_over_every_engine(farm, engine, pool, shape):
    sources, dests = SHAPES[shape](CLASSES[pool].but(**MANY))
    by_layer = shape in ("equal", "PP")
    ranks = [(each,) for each in sources]
    with farm.case(engine, ranks, TOKENS) as (addresses, prefill), ExitStack() as stack:
        rooms = []
        for seed, build in enumerate(dests, 90):
            dest = build()
            oracle.blank(dest)
            decode = DecodeEndpoint(
                dest.layout, create_engine(engine), ranks=len(dests), verify="checksum"
            )
            stack.enter_context(decode).connect(addresses)
            decode.receive("r", table := oracle.place(dest, ROOM, seed), at_most=True)
            rooms.append((decode, dest, table))
        for chunk in (range(9), range(9, TOKENS)):
            if by_layer:
                for layer in LAYERS:
                    prefill("send", "r", chunk, None, range(layer, layer + 1))
            else:
                prefill("send", "r", chunk)
        for decode, dest, table in rooms:
            assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
            assert decode.num_tokens("r") == TOKENS
            oracle.assert_holds(dest, RequestAddress(TOKENS, table.spans))
        assert prefill("wait", "r") == [(KVPoll.Success, None)] * len(sources)


@dataclass(frozen=True)
class Part:
    """What a rank of prefill sends in one call."""

    tokens: range
    layer: int | None = None
    last: bool = False


@st.composite
def parts(draw, holder, tokens):
    """How a rank sends a request: chunks, each at once or by layer, the end with the last or after
    it.
    """
    cuts = sorted(draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=3)) - {tokens})
    edges = [0, *(cut for cut in cuts if cut < tokens), tokens]
    held = sorted({region.layer for region in holder.layout.regions})
    found = []
    for start, stop in pairwise(edges):
        layers = draw(st.permutations(held)) if draw(st.booleans()) else [None]
        found += [Part(range(start, stop), layer) for layer in layers]
    if draw(st.booleans()):
        return [*found, Part(range(tokens, tokens), None, True)]
    return [*found[:-1], Part(found[-1].tokens, found[-1].layer, True)]


HOLDERS = {name: build.but(**MANY) for name, build in CLASSES.items()}
HOLDERS["mha mxfp8"] = PACKED["mha mxfp8"].but(**MANY)
KINDS = [*HOLDERS, "packed", "context parallel"]


def stages(draw, build):
    """Pools of all ranks of one side: pipeline stages of any layers, each of one rank or of two."""
    cuts = sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
    size = draw(st.sampled_from((1, 2)))
    return [
        build(layers=range(*bounds), shard=Shard(rank, size))
        for bounds in zip((0, *cuts), (*cuts, 4))
        for rank in range(size)
    ]


def both(draw, kind, shape):
    """Ranks of prefill and of decode that hold the same state."""
    if kind == "packed":
        more = {"pages": {"window": 5}, "PP": {"tokens_per_entry": 2}}.get(shape, {})
        return [cache(shard=Shard(r, 2), **more) for r in range(2)], [cache(**more)]
    if kind == "context parallel":
        size, here, there = (8, 2, 3) if shape == "equal" else (1, 3, 2)
        return [interleaved(size, r, here) for r in range(here)], [
            interleaved(size, r, there) for r in range(there)
        ]
    if shape == "stages":
        return stages(draw, HOLDERS[kind]), stages(draw, HOLDERS[kind])
    sources, dests = SHAPES[shape](HOLDERS[kind])
    return [build() for build in sources], [build() for build in dests]


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([*SHAPES, "stages"]),
    at_most=st.booleans(),
)
def test_whatever_is_held_and_however_it_is_sent(data, kind, shape, at_most):
    draw = data.draw
    sources, dests = both(draw, kind, shape)
    tokens = draw(st.integers(0, TOKENS))
    most = draw(st.integers(tokens, ROOM)) if at_most else tokens
    start = draw(st.integers(0, tokens))
    for name in dests[0].layout.packed_spaces:  # of which whole pages are written
        size = dests[0].layout.space_by_name[name].tokens_per_item
        start = start // size * size
    tables = [oracle.place(each, tokens, seed) for seed, each in enumerate(sources)]
    for each in sources:
        oracle.blank(each, oracle.SOURCE)
    verify = draw(st.sampled_from([None, "checksum"]))
    with turned(sources, dests, verify=verify) as (prefills, decodes):
        rooms = []
        for decode, dest in zip(decodes, dests):
            spans = draw(without_heads(dest, oracle.place(dest, most, 90), tokens))
            table = RequestAddress(most, spans)
            real = RequestAddress(tokens, table.spans)
            oracle.blank(dest)
            oracle.write(dest, real, range(start), salt=1)
            rooms.append((decode, dest, table, real))

        def ask():
            for decode, _, table, _ in rooms:
                decode.receive("r", table, start=start, at_most=at_most)

        late = draw(st.booleans())
        if not late:
            ask()
        sent = [draw(parts(each, tokens)) for each in sources]
        turns = [rank for rank, each in enumerate(sent) for _ in each]
        for rank in draw(st.permutations(turns)):
            part, holder, table = sent[rank].pop(0), sources[rank], tables[rank]
            layers = None if part.layer is None else range(part.layer, part.layer + 1)
            oracle.write(oracle.of_layers(holder, layers or LAYERS), table, part.tokens)
            now = RequestAddress(part.tokens.stop, table.spans)
            prefills[rank].send("r", now, tokens=part.tokens, layers=layers, last=part.last)
            if draw(st.booleans()):
                turn(*prefills, *decodes, rounds=2)
        if late:
            ask()
        turn(*prefills, *decodes)
        for decode, dest, _, real in rooms:
            assert decode.poll("r") is KVPoll.Success, decode.failure("r")
            assert decode.num_tokens("r") == tokens
            oracle.assert_holds(dest, real, range(start, tokens), kept=range(start))
        assert {each.poll("r") for each in prefills} == {KVPoll.Success}


@st.composite
def without_heads(draw, dest, table, tokens):
    """The spans of a block table, windows from any item on that is not behind the first live one
    of `tokens` tokens.
    """
    spans = dict(table.spans)
    for space in dest.layout.spaces:
        alone = sum(each.id_list == space.id_list for each in dest.layout.spaces) == 1
        if space.window is not None and space.kind == "paged" and alone:
            alive = oracle.live(space, range(tokens), tokens)
            first = int(alive[0]) // space.entries_per_item if alive.size else 0
            first = draw(st.integers(0, min(first, spans[space.name].ids.size)))
            spans[space.name] = Span(spans[space.name].ids[first:], first)
    return spans


def one_to_one(build):
    """A prefill and a decode of one rank each, and their pools."""
    source, dest = build(), build()
    given_table = oracle.filled(source, TOKENS, 1)
    oracle.blank(dest)
    return source, dest, given_table


@pytest.mark.parametrize(("last", "at_most"), [(True, True), (False, True), (True, False)])
def test_more_tokens_than_there_is_room_for_fail_on_both_sides(last, at_most):
    source, dest, table = one_to_one(mla.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        decode.receive("r", oracle.place(dest, 20), at_most=at_most)
        turn(prefill, decode)
        prefill.send("r", table, last=last)
        turn(prefill, decode)
        more = f"at most 20. Give `receive` a block table with room for {TOKENS} or more."
        said = f"prefill computed {TOKENS} tokens, decode made room for "
        for side in (prefill, decode):
            assert said + (more if at_most else "20.") in side.failure("r").reason
        with pytest.raises(RoomError, match="how many tokens it has is known once it has succeed"):
            decode.num_tokens("r")
        for side in (prefill, decode):
            side.forget("r")
        decode.receive("r", into := oracle.place(dest, TOKENS), at_most=True)  # the retry
        prefill.send("r", table)
        turn(prefill, decode)
        assert decode.poll("r") is prefill.poll("r") is KVPoll.Success
        oracle.assert_holds(dest, into)


def test_fewer_tokens_than_decode_has_fail_on_both_sides():
    source, dest, table = one_to_one(mla.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        decode.receive("r", oracle.place(dest, ROOM), start=24, at_most=True)
        prefill.send("r", table)
        turn(prefill, decode)
        for side in (prefill, decode):
            assert (
                f"prefill computed {TOKENS} tokens, decode asked for those from position 24 on. "
                f"Give `receive` a `start` of at most {TOKENS}." in side.failure("r").reason
            )


@pytest.mark.parametrize(("first", "second"), [(15, TOKENS), (TOKENS, 15)])
def test_ranks_that_say_different_numbers_fail_by_name(first, second):
    sources = [mla.but(layers=part, total_kv_layers=4, **MANY)() for part in (range(2), (2, 3))]
    dest = mla.but(**MANY)()
    with turned(sources, [dest]) as (prefills, [decode]):
        decode.receive("r", oracle.place(dest, ROOM), at_most=True)
        for prefill, source, tokens in zip(prefills, sources, (first, second)):
            prefill.send("r", oracle.place(source, tokens))
            turn(*prefills, decode)
        for side in (*prefills, decode):
            assert side.failure("r").reason.endswith(
                f"rank 1 of prefill (p1): prefill computed {second} tokens, rank 0 of prefill (p0) "
                f"says {first}. Send the same tokens of a request from all ranks."
            )


def test_a_window_of_which_decode_lists_too_little_is_refused_by_its_positions():
    """The window is 6 tokens in pages of 2: at 21 tokens it begins at 15, at 30 at 24."""
    source, dest, table = one_to_one(swa.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        into = oracle.place(dest, ROOM)
        window = next(s for s in dest.layout.spaces if s.window is not None)
        spans = {**into.spans, window.name: Span(into.spans[window.name].ids[12:], 12)}
        decode.receive("r", RequestAddress(ROOM, spans), at_most=True)
        prefill.send("r", table)
        turn(prefill, decode)
        for side in (prefill, decode):
            assert (
                f"space {window.name} needs items for positions 14 to 21, its block table covers "
                "24 to 29. List the items of all of them." in side.failure("r").reason
            )


def test_the_number_is_known_of_every_room_that_has_succeeded():
    source, dest, table = one_to_one(mla.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        decode.receive("exact", oracle.place(dest, TOKENS))
        decode.decline("declined")
        for room in ("exact", "declined"):
            with pytest.raises(RoomError, match="known once it has succeeded"):
                decode.num_tokens(room)
            with pytest.raises(RoomError, match="has succeeded"):
                decode.aux(room)
            prefill.send(room, table)
        turn(prefill, decode)
        assert decode.poll("exact") is decode.poll("declined") is KVPoll.Success
        assert decode.num_tokens("exact") == decode.num_tokens("declined") == TOKENS


def test_layers_are_ready_once_the_number_is_known_and_they_are_read():
    source, dest, table = one_to_one(swa.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        decode.receive("r", oracle.place(dest, TOKENS), at_most=True)
        for layer in LAYERS:
            turn(prefill, decode)
            assert not any(decode.layer_ready("r", each) for each in LAYERS)
            prefill.send("r", table, layers=range(layer, layer + 1), last=layer == LAYERS[-1])
        assert decode.wait_layer("r", 0, 10) is not KVPoll.Failed
        turn(prefill, decode)
        assert decode.poll("r") is KVPoll.Success


def test_a_full_space_is_read_before_the_number_is_known():
    source, dest, table = one_to_one(mla.but(**MANY))
    with turned([source], [dest]) as ([prefill], [decode]):
        decode.receive("r", oracle.place(dest, ROOM), at_most=True)
        prefill.send("r", RequestAddress(9, table.spans), last=False)
        turn(prefill, decode)
        assert decode.metrics("r").bytes_moved == 9 * dest.bytes_per_token
        prefill.send("r", table)
        turn(prefill, decode)
        assert decode.poll("r") is KVPoll.Success


def test_a_start_inside_a_packed_page_is_refused_wherever_the_request_ends():
    source, dest = (cache(window=5) for _ in range(2))
    with turned([source], [dest]) as (_, [decode]):
        with pytest.raises(RoomError, match="start 6 lies inside a page of space kv"):
            decode.receive("r", oracle.place(dest, ROOM), start=6, at_most=True)
        decode.receive("r", oracle.place(dest, ROOM), start=6)  # whose window begins later


every = pytest.mark.parametrize("build", CLASSES.values(), ids=CLASSES.keys())


@contextmanager
def receiving(build):
    """A source pool, and prefill, another pool and its decode."""
    source, dest = build(**MANY), build(**MANY)
    with connected(source, dest, verify="checksum") as (prefill, decode):
        oracle.blank(dest)
        yield source, prefill, dest, decode


def received(source, prefill, decode, request, tokens, start=0):
    """Receives `tokens` tokens into a request that has room for more; returns how many came."""
    table = oracle.filled(source, tokens, 3)
    decode.receive("r", request.address(), start=start, at_most=True)
    prefill.send("r", table)
    succeeds(decode, "r")
    return decode.num_tokens("r")


@every
@pytest.mark.parametrize("tokens", [0, 7, 21, ROOM])
def test_fewer_tokens_than_there_is_room_for_come_whole_and_the_request_goes_on(build, tokens):
    with receiving(build) as (source, prefill, dest, decode):
        alloc = Allocator(dest)
        request, other = alloc.new_request(), alloc.new_request()
        alloc.extend(request, ROOM, at_most=True)
        count = received(source, prefill, decode, request, tokens)
        assert count == tokens
        alloc.truncate(request, count)
        assert request.num_tokens == request.received_tokens == tokens
        alloc.check_integrity()
        oracle.assert_holds(dest, request.address())
        alloc.extend(other, 2)  # of the pages that came back
        alloc.extend(request, 7)
        oracle.write(dest, request.address(), range(tokens, tokens + 7))
        assert oracle.holds(dest, request.address())
        exact = alloc.usage().used
        for each in (request, other):
            alloc.free(each)
        for size, got in ((tokens, True), (7, False)):  # as one whose number was known
            if got:
                request, other = alloc.new_request(), alloc.new_request()
            alloc.extend(request, size, received=got)
        alloc.extend(other, 2)
        assert alloc.usage().used == exact


@every
def test_a_prefix_that_is_there_stays_and_what_follows_it_comes(build):
    with receiving(build) as (source, prefill, dest, decode):
        alloc = Allocator(dest)
        request = alloc.new_request()
        alloc.extend(request, 8)
        alloc.extend(request, ROOM - 8, at_most=True)
        coming = RequestAddress(21, request.address().spans)
        oracle.write(dest, coming, range(8), salt=1)
        with pytest.raises(ValueError, match="tokens: 8 to 30, which it has, got 7"):
            alloc.truncate(request, 7)
        alloc.truncate(request, received(source, prefill, decode, request, 21, start=8))
        oracle.assert_holds(dest, request.address(), range(8, 21), kept=range(8))


def test_of_a_window_every_page_that_may_be_alive_is_listed():
    """The window is 6 tokens in pages of 2."""
    alloc = Allocator(swa(**{**MANY, "num_pages": 20}))
    request, exact = alloc.new_request(), alloc.new_request()
    alloc.extend(request, ROOM, received=True, at_most=True)
    alloc.extend(exact, ROOM, received=True)
    spans = [each.address().spans["swa"] for each in (request, exact)]
    assert [(span.first_item, span.ids.size) for span in spans] == [(0, 15), (12, 3)]
    alloc.truncate(request, 21)
    span = request.address().spans["swa"]
    assert (span.first_item, span.ids.size) == (0, 11)
    alloc.extend(request, 1)
    assert request.address().spans["swa"].first_item == 7  # what was dead is given back


@pytest.mark.parametrize("build", [mla, swa, hybrid, dsv4])
def test_until_the_number_is_said_nothing_goes_on_from_it(build):
    pool = build(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache(checkpoint_tokens=8))
    request, other = alloc.new_request(), alloc.new_request()
    alloc.extend(request, 20, at_most=True)
    used = alloc.usage().used
    for call in (
        lambda: alloc.extend(request, 1),
        lambda: alloc.extend_batch([other, request], 1),
        lambda: alloc.fork(request, 20),
        lambda: alloc.store(request, range(8)),
        lambda: pool.save(request.address()),
    ):
        with pytest.raises(ValueError, match=r"receives from 0 to 20 tokens, .* Call truncate"):
            call()
    assert alloc.usage().used == used and other.num_tokens == 0
    alloc.truncate(request, 20)  # all came
    alloc.extend(request, 1)
    alloc.check_integrity()


def test_the_number_is_not_said_while_a_room_receives():
    with receiving(swa) as (_, _, dest, decode):
        alloc = Allocator(dest)
        request = alloc.new_request()
        alloc.extend(request, ROOM, at_most=True)
        decode.receive("r", request.address(), at_most=True)
        for tokens in (21, ROOM):
            with pytest.raises(RequestPinned, match="room 'r' receives"):
                alloc.truncate(request, tokens)
        decode.abort("r", "not needed")
        assert decode.wait("r", 10) is KVPoll.Failed
        alloc.free(request)
        assert not any(alloc.usage().used.values())


def test_a_batch_receives_at_most_so_many_each_and_each_number_is_said():
    alloc = Allocator(dsv4(**MANY))
    requests = [alloc.new_request() for _ in range(3)]
    alloc.extend_batch(requests, [5, 9, 12], at_most=True)
    alloc.truncate_batch(requests, [5, 0, 7])
    assert [each.num_tokens for each in requests] == [5, 0, 7]
    alloc.extend_batch(requests, 3)
    alloc.check_integrity()
