"""Pictures in prompts: digests of what an encoder is given, and that state behind one picture is
never read behind another.
"""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from disagg.connectors.store.media import MediaDigests, Medium, media_digest
from kvpool.prefix.chain import MediaSpan
from tests.disagg.connectors.store.engines import CHUNK, Engine
from tests.disagg.store.stores import fresh

LENGTH = 4 * CHUNK + 5


def shown(ids, pictures):
    """What a model sees: at a picture's positions numbers that are the picture's own."""
    numbers = [*ids]
    for start, stop, number in pictures:
        for position in range(start, stop):
            numbers[position] = 10_000 * (number + 1) + 100 * (stop - start) + position - start
    return numbers


def spans(pictures):
    return [MediaSpan(range(a, b), bytes([number] * 32)) for a, b, number in pictures]


def computed(engine, name, ids, pictures):
    """A request that is computed, a chunk a step, and written."""
    engine.scheduler.arrived(name, ids, "", media=spans(pictures))
    more = engine.matched(name)
    engine.scheduler.allocated(name, lambda: (), 0)
    blocks, sees = engine.blocks(len(ids), whole=True), shown(ids, pictures)
    engine.fill(sees, blocks, 0, more)
    for start in range(more, len(ids), CHUNK):
        engine.compute(name, sees, blocks, start, min(start + CHUNK, len(ids)))
    engine.written()
    engine.scheduler.finished(name)


def read(engine, name, ids, pictures):
    """How much a request begins with, all of which is what it would have computed."""
    engine.scheduler.arrived(name, ids, "", media=spans(pictures))
    more = engine.matched(name)
    blocks = engine.blocks(more)
    engine.scheduler.allocated(name, lambda: blocks, more)
    if more:
        engine.until(lambda: name in engine.received)
    assert not engine.failed
    assert not more or engine.holds(shown(ids, pictures), blocks, 0, more)
    return more


def common(one, other, ids):
    """How many tokens the two may share: whole chunks in which the same pictures lie."""
    ends = range(0, len(ids), CHUNK)
    return max(n for n in ends if {p for p in one if p[0] < n} == {p for p in other if p[0] < n})


IDS = [7] * LENGTH
"""A picture's tokens say nothing of it."""
CAT, DOG = 1, 2


@pytest.mark.parametrize(
    ("one", "other", "tokens"),
    [
        ([(20, 30, CAT)], [(20, 30, CAT)], 4 * CHUNK),
        ([(20, 30, CAT)], [(20, 30, DOG)], CHUNK),
        ([(20, 30, CAT)], [(21, 31, CAT)], CHUNK),
        ([(20, 30, CAT)], [(20, 31, CAT)], CHUNK),
        ([(20, 30, CAT)], [], CHUNK),
        ([(20, 30, CAT)], [(36, 46, CAT)], CHUNK),
        ([(16, 30, CAT)], [(16, 30, DOG)], CHUNK),
        ([(0, 30, CAT)], [(0, 30, DOG)], 0),
        ([(20, 25, CAT), (40, 45, DOG)], [(20, 25, DOG), (40, 45, CAT)], CHUNK),
        ([(20, 25, CAT), (40, 45, DOG)], [(20, 25, CAT), (40, 45, CAT)], 2 * CHUNK),
        ([(20, 22, CAT), (22, 30, DOG)], [(20, 22, DOG), (22, 30, CAT)], CHUNK),
        ([(20, 60, CAT)], [(20, 60, DOG)], CHUNK),
        ([(20, 60, CAT)], [(20, 60, CAT)], 4 * CHUNK),
        ([(31, 33, CAT)], [(31, 33, DOG)], CHUNK),
        ([(48, 60, CAT)], [(48, 60, DOG)], 3 * CHUNK),
        ([(64, 69, CAT)], [(64, 69, DOG)], 4 * CHUNK),
    ],
)
def test_what_is_before_another_picture_is_shared_and_nothing_else(one, other, tokens):
    assert common(one, other, IDS) == tokens
    url = fresh()
    with Engine(url) as writes, Engine(url, 16) as reads, Engine(url, 4) as again:
        computed(writes, "w", IDS, one)
        assert read(reads, "r", IDS, other) == tokens
        computed(reads, "w", IDS, other)
        assert read(again, "one", IDS, one) == 4 * CHUNK
        assert read(again, "other", IDS, other) == 4 * CHUNK


def apart(pictures):
    """Those of them that lie in no other."""
    chosen = []
    for start, length, number in sorted(pictures):
        if not chosen or start >= chosen[-1][1]:
            chosen.append((start, min(start + length, LENGTH), number))
    return chosen


PICTURES = st.lists(
    st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 40), st.sampled_from([CAT, DOG])),
    max_size=3,
).map(apart)


@settings(max_examples=25, deadline=None)
@given(st.lists(PICTURES, min_size=2, max_size=4))
def test_no_request_begins_with_state_of_other_pictures(prompts):
    url = fresh()
    with Engine(url, state=False) as one, Engine(url, 16, state=False) as other:
        for number, pictures in enumerate(prompts):
            longest = max([0, *(common(pictures, earlier, IDS) for earlier in prompts[:number])])
            assert read(other, f"r{number}", IDS, pictures) == longest
            computed(one, f"w{number}", IDS, pictures)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 2), st.floats(-1, 1), st.sampled_from([-0.0]),
        st.text("ab1", max_size=3), st.binary(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(VALUES, max_size=8))
def test_no_two_values_have_one_digest(values):
    digests = {media_digest(value): repr_of(value) for value in values}
    assert len(digests) == len({repr_of(value) for value in values})


def repr_of(value):
    """A value as text, whatever the order of a mapping."""
    if isinstance(value, dict):
        return repr({name: repr_of(value[name]) for name in sorted(value)})
    return repr([repr_of(one) for one in value]) if isinstance(value, list) else repr(value)


DATA = torch.arange(24, dtype=torch.float32)


def test_shape_and_dtype_of_a_tensor_are_in_its_digest():
    forms = [
        DATA,
        DATA.reshape(4, 6),
        DATA.reshape(6, 4),
        DATA.to(torch.bfloat16),
        DATA.to(torch.float16),
        DATA.view(torch.int32),
        DATA.numpy(),
        DATA.numpy().tobytes(),
        DATA[:0],
        DATA[:0].reshape(0, 3),
        [DATA[:12], DATA[12:]],
        [DATA],
        torch.tensor(3),
        3,
        torch.tensor([True]),
        np.arange(24, dtype="<f4").reshape(4, 6).T,
    ]
    assert len({media_digest(form) for form in forms}) == len(forms)
    for same in (
        (DATA.reshape(4, 6).T, DATA.reshape(4, 6).T.contiguous()),
        (np.arange(24).reshape(4, 6).T, np.ascontiguousarray(np.arange(24).reshape(4, 6).T)),
        ([1, "a"], (1, "a")),
    ):
        assert len({media_digest(one) for one in same}) == 1


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), {1: 2, "a": 3}])
def test_what_has_no_form_has_no_digest(value):
    with pytest.raises(TypeError):
        media_digest([1, value])


class Picture:
    """As an engine has it."""

    def __init__(self, number):
        self.number = number


def medium(start, picture, name=()):
    return Medium(range(start, start + 10), name, picture)


def test_a_pictures_digest_is_of_its_data_and_name():
    digests = MediaDigests(lambda picture: picture.number)
    named = [
        medium(0, Picture(1)), medium(20, Picture(2)), medium(40, Picture(1)),
        medium(60, Picture(1), ("audio",)),
    ]  # fmt: skip
    found, most = digests.spans(named, 1000).result(20)
    assert most == 1000
    assert [span.positions.start for span in found] == [0, 20, 40, 60]
    one, two, again, audio = (span.digest for span in found)
    assert one == again and len({one, two, audio}) == 3
    digests.close()


def test_behind_a_picture_that_has_no_digest_nothing_is_keyed(caplog):
    digests = MediaDigests(lambda picture: picture.number)
    listed = [medium(0, Picture(1)), medium(20, Picture({1})), medium(40, Picture(2))]
    found, most = digests.spans(listed, 1000).result(20)
    assert ([span.positions.start for span in found], most) == ([0], 20)
    assert "set has no digest" in caplog.text
    assert digests.spans(listed[:1], 5).result(20)[1] == 5
    digests.close()


def test_an_object_is_read_once_while_it_lives():
    asked, pictures = [], [Picture(n) for n in range(3)]
    digests = MediaDigests(lambda picture: asked.append(picture.number) or picture.number)
    for _ in range(3):
        first, _ = digests.spans([medium(0, one) for one in pictures], 1).result(20)
    assert asked == [0, 1, 2]
    del pictures[:]
    gc.collect()
    # perhaps where one of those lay
    later, _ = digests.spans([medium(0, Picture(n)) for n in range(5, 8)], 1).result(20)
    assert asked == [0, 1, 2, 5, 6, 7]
    assert not {span.digest for span in later} & {span.digest for span in first}
    digests.close()


def test_whoever_asks_does_not_wait():
    gate = threading.Event()
    digests = MediaDigests(lambda picture: gate.wait(20) and picture.number)
    began = time.monotonic()
    asked = digests.spans([medium(0, Picture(1))], 1)
    assert time.monotonic() - began < 1 and not asked.done()
    gate.set()
    assert len(asked.result(20)[0]) == 1
    digests.close()
