"""A store's half in a scheduler and its half in a worker, together, over engines of made-up state:
what one engine has computed another reads, byte by byte; what cannot be read is computed.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from disagg.store.floors import open_floor
from tests.disagg.connectors.store.engines import CHUNK, Engine
from tests.disagg.store.stores import fresh

PROMPT = list(range(100, 160))  # three chunks and twelve tokens
HITS = "kvpool_store_outcomes_total\tkv\thit"


def computed(engine, tokens=PROMPT, name="w", salt="", stops=range(CHUNK, len(PROMPT) + 1, CHUNK)):
    """A request that is computed chunk by chunk, and all of it written."""
    engine.scheduler.arrived(name, tokens, salt)
    blocks = engine.blocks(len(tokens), whole=True)
    start = 0
    for stop in (*stops, len(tokens)):
        if start < stop <= len(tokens):
            engine.compute(name, tokens, blocks, start, stop)
            start = stop
    engine.written()
    engine.scheduler.finished(name)


def read(engine, tokens, name="r", salt=""):
    """How many tokens a request begins with, and its blocks."""
    engine.scheduler.arrived(name, tokens, salt)
    more = engine.matched(name)
    blocks = engine.blocks(more)
    engine.scheduler.allocated(name, lambda: blocks, more)
    if more:
        engine.until(lambda: name in engine.received)
    return more, blocks


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("there", "here"), [(8, 8), (4, 16), (16, 4)])
def test_an_engine_begins_with_what_another_has_computed(there, here, state):
    url = fresh()
    with Engine(url, there, state=state) as one, Engine(url, here, state=state) as other:
        computed(one)
        more, blocks = read(other, [*PROMPT[:-5], 7, 7])
        assert more == 3 * CHUNK
        assert not other.failed
        assert other.holds(PROMPT, blocks, 0, more)
        assert other.cleared[0].stop == more


def test_a_whole_prompt_leaves_a_token_to_compute():
    url = fresh()
    with Engine(url) as one, Engine(url) as two, Engine(url, recomputes=CHUNK + 1) as three:
        computed(one)
        for other, more in ((two, 2), (three, 1)):
            found, blocks = read(other, PROMPT[: 3 * CHUNK])
            assert found == more * CHUNK
            assert other.holds(PROMPT, blocks, 0, found)


@pytest.mark.parametrize(("unit", "more"), [(8, 3), (32, 2), (24, 3), (64, 0)])
def test_a_hit_is_whole_blocks_where_an_engine_shares_blocks(unit, more):
    url = fresh()
    with Engine(url) as one, Engine(url, unit=unit) as other:
        computed(one)
        assert read(other, PROMPT)[0] == more * CHUNK


def test_positions_that_an_engine_has_are_not_read():
    url = fresh()
    with Engine(url, 4) as one, Engine(url, 4) as other:
        computed(one)
        other.scheduler.arrived("r", PROMPT, "")
        own = 20
        assert other.matched("r", own) == 3 * CHUNK - own
        blocks = other.blocks(3 * CHUNK)
        before = other.memory.clone()
        other.scheduler.allocated("r", lambda: blocks, 3 * CHUNK - own)
        other.until(lambda: other.received == ["r"])
        assert other.holds(PROMPT, blocks, own, 3 * CHUNK)
        for position in range(own):
            block, place = blocks[0][position // 4], position % 4
            assert (other.memory[block, 0, place] == before[block, 0, place]).all()
        assert other.matched("r", 3 * CHUNK) == 0


def test_what_is_another_tenants_is_not_found():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one, salt="one")
        assert read(other, PROMPT, salt="two")[0] == 0
        assert read(other, PROMPT, "again", salt="one")[0] == 3 * CHUNK


def test_of_state_that_a_request_has_once_only_chunk_ends_are_written():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one, stops=[10, 2 * CHUNK, 40])
        more, blocks = read(other, PROMPT)
        assert more == 2 * CHUNK  # of its state only
        assert other.holds(PROMPT, blocks, 0, more)


def test_state_that_an_engine_offers_is_written_from_where_it_lies():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        one.scheduler.arrived("w", PROMPT, "")
        blocks = one.blocks(60, whole=True)
        kept = next(one._ids)
        states = {3 * CHUNK: {2: kept}, 3 * CHUNK + 4: {2: 1}}
        one.scheduler.computed("w", 60, lambda: blocks, states)

        def forward():
            one.fill(PROMPT, (*blocks[:2], (kept,)), 0, 3 * CHUNK)
            one.fill(PROMPT, blocks, 3 * CHUNK, 60)

        one.step(forward)
        one.written()
        more, there = read(other, PROMPT)
        assert more == 3 * CHUNK
        assert other.holds(PROMPT, there, 0, more)


def test_tokens_that_are_not_known_yet_are_not_written():
    """Drafts, and the last token of a step that runs ahead of what was sampled."""
    with Engine(fresh(), state=False) as one:
        tokens = PROMPT[: CHUNK - 1]
        one.scheduler.arrived("w", tokens, "")
        blocks = one.blocks(60)
        one.scheduler.computed("w", CHUNK, lambda: blocks)
        assert not one.step().writes
        tokens.append(3)
        one.scheduler.computed("w", CHUNK + 1, lambda: blocks)
        (write,) = one.step().writes
        assert (write.first, len(write.keys), write.computed) == (0, 1, CHUNK + 1)
        one.scheduler.computed("w", CHUNK + 1, lambda: blocks)
        assert not one.step().writes  # once


def test_generated_tokens_are_found_in_the_next_turn():
    url = fresh()
    with Engine(url, state=False) as one, Engine(url, 16, state=False) as other:
        tokens, blocks = PROMPT[:30], one.blocks(60, whole=True)
        one.scheduler.arrived("w", tokens, "")
        one.compute("w", tokens, blocks, 0, 30)
        for position in range(30, 50):
            tokens.append(1000 + position)
            one.compute("w", tokens, blocks, position, position + 1)
        one.written()
        more, there = read(other, [*tokens, 1, 2])
        assert more == 3 * CHUNK
        assert other.holds(tokens, there, 0, more)


def test_chunks_that_were_found_are_not_written_again():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one)
        read(other, [*PROMPT, *range(40)])
        longer = other.blocks(100)
        other.scheduler.computed("r", 100, lambda: longer)
        (write,) = other.step().writes
        assert (write.first, len(write.keys)) == (3, 3)
        keys = other.scheduler._store.keys([*PROMPT, *range(40)]).keys
        assert (write.parent, *write.keys) == keys[2:6]


def test_only_tokens_that_say_what_they_are_are_keyed():
    url = fresh()
    with Engine(url, state=False) as one, Engine(url, state=False) as other:
        one.scheduler.arrived("w", PROMPT, "", most=40)
        blocks = one.blocks(60, whole=True)
        one.compute("w", PROMPT, blocks, 0, 60)
        one.written()
        other.scheduler.arrived("r", PROMPT, "", most=20)
        assert other.matched("r") == CHUNK
        assert read(other, PROMPT, "s")[0] == 2 * CHUNK
        other.scheduler.arrived("t", PROMPT, "", reads=False)
        assert other.matched("t") == 0
        assert other.scheduler.matched("unknown", 0) == 0


def test_a_preempted_request_asks_again():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one, PROMPT[::-1])
        assert read(other, PROMPT)[0] == 0
        computed(one)
        assert other.matched("r") == 3 * CHUNK


def test_blocks_that_a_request_gives_up_are_copied_before_others_have_them():
    with Engine(fresh()) as engine:
        blocks = engine.blocks(len(PROMPT), whole=True)

        def steps(*runs):
            """Whether its store settles in a step in which requests go on."""
            engine.scheduler.kept(lambda: set(runs))
            return engine.scheduler.step().settles

        for name in "ab":
            engine.scheduler.arrived(name, PROMPT, "", reads=False)
        assert not steps("a", "b")
        engine.scheduler.computed("a", CHUNK, lambda: blocks)
        assert not steps("a", "b") and not steps("a")
        engine.scheduler.computed("b", CHUNK, lambda: blocks)
        assert not steps("a", "b")
        assert steps("a")  # b is preempted, or has ended
        assert not steps("a") and not steps()
        engine.scheduler.computed("a", 2 * CHUNK, lambda: blocks)
        assert not steps("a") and steps()


class Gate:
    """A floor that answers while it is open."""

    def __init__(self, floor, gate):
        self._floor, self._gate = floor, gate

    def __getattr__(self, name):
        def call(*given):
            assert self._gate.wait(20)
            return getattr(self._floor, name)(*given)

        return call


@pytest.fixture
def gate(monkeypatch):
    """Whether floors answer."""
    event = threading.Event()
    event.set()
    monkeypatch.setattr("disagg.store.store.open_floor", lambda url: Gate(open_floor(url), event))
    yield event
    event.set()


def test_a_silent_floor_delays_one_request_and_no_other(gate):
    url = fresh()
    with Engine(url) as one, Engine(url, timeout=0.3) as other:
        computed(one)
        gate.clear()
        assert read(other, PROMPT)[0] == 0
        for name in "abcdefgh":
            other.scheduler.arrived(name, PROMPT, "")
            assert other.scheduler.matched(name, 0) == 0  # at once
            other.scheduler.allocated(name, lambda: (), 0)
            other.scheduler.finished(name)
        gate.set()
        names = map(str, itertools.count())
        other.until(lambda: read(other, PROMPT, next(names))[0] == 3 * CHUNK)


def test_a_read_that_is_late_is_computed_and_nothing_of_it_lands(gate):
    url = fresh()
    with Engine(url) as one, Engine(url, timeout=0.5) as other:
        computed(one)
        other.scheduler.arrived("r", PROMPT, "")
        more = other.matched("r")
        assert more == 3 * CHUNK
        gate.clear()
        blocks, before = other.blocks(more), other.memory.clone()
        other.scheduler.allocated("r", lambda: blocks, more)
        other.until(lambda: "r" in other.received)
        assert other.failed == {"r"}
        assert other.matched("r") == 0
        gate.set()
        other.scheduler.arrived("probe", PROMPT, "")
        other.until(lambda: other.scheduler.matched("probe", 0) == 3 * CHUNK)
        assert (other.memory == before).all()
        assert other.received == ["r"]
        assert other.scheduler.stats.take()[HITS] >= 1


def test_a_request_that_ends_while_it_is_read_is_received_once_and_has_not_failed(gate):
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one)
        other.scheduler.arrived("r", PROMPT, "")
        more = other.matched("r")
        gate.clear()
        blocks, before = other.blocks(more), other.memory.clone()
        other.scheduler.allocated("r", lambda: blocks, more)
        other.step()
        assert not other.received
        other.scheduler.finished("r")
        other.step()
        assert (other.received, other.failed) == (["r"], set())
        gate.set()
        assert read(other, PROMPT, "again")[0] == more
        other.step()
        assert other.received == ["r", "again"]
        for group, table in enumerate(blocks):
            for block in table:
                assert not block or (other.memory[block, group] == before[block, group]).all()


def test_a_request_may_end_before_it_is_known_what_is_stored(gate):
    url = fresh()
    with Engine(url, timeout=0.2) as other:
        gate.clear()
        other.scheduler.arrived("r", PROMPT, "")
        assert other.scheduler.matched("r", 0) is None
        other.scheduler.finished("r")
        gate.set()
        assert read(other, PROMPT, "again")[0] == 0


def damage(folder, key):
    (path,) = Path(folder).rglob(f"{key.hex()}/*.full")
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("said", [(), [("rope", "a")]])
def test_a_damaged_object_is_computed_and_written_again(said, tmp_path):
    """In its place, or beside it where its writer says what this engine does not."""
    url = f"file://{tmp_path}"
    with Engine(url, said=said) as one:
        computed(one)
        damage(tmp_path, one.scheduler._store.keys(PROMPT).keys[1])
    with Engine(url, 16) as other:
        assert read(other, PROMPT)[0] == 3 * CHUNK
        assert other.failed == {"r"}
        assert other.matched("r") == 0
        blocks = other.blocks(60, whole=True)
        start = 0
        for stop in (CHUNK, 2 * CHUNK, 3 * CHUNK):
            other.compute("r", PROMPT, blocks, start, stop)
            start = stop
        other.written()
        more, there = read(other, PROMPT, "again")
        assert more == 3 * CHUNK
        assert other.failed == {"r"}
        assert other.holds(PROMPT, there, 0, more)


def test_what_the_store_says_and_counts():
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one)
        one.scheduler.stop("weights are others")
        one.scheduler.arrived("r", PROMPT, "")
        assert one.scheduler.matched("r", 0) == 0
        assert one.step().writes == []
        more, _ = read(other, PROMPT)
        other.step()
        numbers = other.scheduler.stats.take()
        assert (numbers[HITS], numbers["kvpool_store_tokens_total\tkv\thit"]) == (1, more)
        assert other.scheduler.stats.take() is None


def test_a_store_that_a_rank_cannot_open_fails_reads_and_no_engine(monkeypatch):
    url = fresh()
    with Engine(url) as one, Engine(url) as other:
        computed(one)

        def refuse(url):
            raise OSError("no such floor")

        monkeypatch.setattr("disagg.store.store.open_floor", refuse)
        assert read(other, PROMPT)[0] == 3 * CHUNK
        assert other.failed == {"r"}
        blocks = other.blocks(60)
        other.compute("r", PROMPT, blocks, 0, 60)


def test_weights_that_nothing_names_are_refused_unless_a_setting_does():
    """Two models of one configuration would read each other's state."""
    with Engine(fresh()) as engine:
        rank = [(engine.layout.to_msgpack(), {"model": "m"})]
        with pytest.raises(ValueError, match="nothing says which weights the model has"):
            engine.scheduler.open(rank)
    with Engine(fresh(), conventions={"weights": "by name"}) as engine:
        engine.scheduler.open(rank)
    with pytest.raises(ValueError, match="nothing says which weights"):
        Engine(fresh(), conventions={"weights": None})
