"""Reported failures of peers that abort, restart and die, reproduced between processes."""

from __future__ import annotations

import re
import signal
from contextlib import contextmanager

import pytest

from disagg.protocol.status import KVPoll
from tests.disagg.engines.peers import ENGINES
from tests.faults.orders import SHAPES, Course
from tests.faults.stock import MOST_TOKENS
from tests.faults.world import BOUND, PATIENCE, World

# over TCP NIXL's reads are in flight; over CMA they end within the call
OVER = ["nixl tcp" if engine == "nixl" else f"{engine} pair" for engine in ENGINES]
WHOLE = Course(tokens=MOST_TOKENS - 1, salt=3, wanted=0.1)
BESIDE = Course(tokens=90, salt=5)
PAIRS = [(prefill, decode) for prefill in ("p0", "p1") for decode in ("d0", "d1")]


@pytest.fixture(scope="module", params=OVER)
def begin(request):
    """Starts a request from p0 to d1 in a world of two prefills and two decodes. The next test
    reuses the world if everything works at the end.
    """
    kept = []

    @contextmanager
    def begun():
        world = kept.pop() if kept else World(SHAPES[request.param])
        try:
            world.ensure()
            world.tripped = None
            yield world, world.order("p0", ["d1"], WHOLE)
            assert_whole(world)
        except BaseException:
            world.kill()
            raise
        kept.append(world)

    yield begun
    for world in kept:
        try:
            world.close()
        finally:
            world.kill()


def struck(world):
    """Waits until the trip point is reached; returns the time."""
    assert world.until(lambda: world.tripped is not None, PATIENCE)
    return world.tripped


def assert_whole(world):
    """Every pair works again; no page is lost, and no other request's byte has changed."""
    world.ensure()
    pairs = PAIRS
    while pairs:  # a peer that was given up may learn it only now
        pairs = world.failed(pairs, BESIDE)
    world.check_pages()


def test_destination_pages_of_an_aborted_read_are_handed_out_once_it_has_ended(begin):
    """sglang#24527, #30233."""
    with begin() as (world, room):
        world.tell("d1", "trip_abort", 5, room.number, "no longer needed")
        struck(world)
        ends = world.ends(room)
        assert {state for state, _ in ends.values()} == {KVPoll.Failed}
        assert all("no longer needed" in reason for _, reason in ends.values())


def test_source_pages_that_were_handed_out_before_they_were_read_fail_their_reader(begin):
    """TensorRT-LLM#14565."""
    with begin() as (world, room):
        world.trip("d1", "read", 5, "d1", signal.SIGSTOP)
        struck(world)
        world.tell("p0", "abort", room.number, "no longer needed")
        assert world.until(lambda: "p0" in room.back, PATIENCE)
        assert "d1" not in room.ended
        world.signal("d1", signal.SIGCONT)
        ends = world.ends(room)
        assert {state for state, _ in ends.values()} == {KVPoll.Failed}


def test_a_prefill_that_restarts_between_plan_and_post_fails_the_room(begin):
    """nixl#2051, vllm#49238, smg#2382."""
    with begin() as (world, room):
        world.trip("d1", "take ChunkReady", 1, "d1", signal.SIGSTOP)
        struck(world)
        world.signal("p0", signal.SIGKILL)
        world.bury("p0")
        world.ensure(stopped=["d1"])
        world.signal("d1", signal.SIGCONT)
        state, reason = world.ends(room)["d1"]
        assert state is KVPoll.Failed
        assert "rank 0 of prefill (tcp://127.0.0.1:" in reason


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["p0", "d1"])
def test_a_peer_that_dies_silently_is_noticed_and_fails_only_its_own_rooms(begin, victim, how):
    """nixl#795, TensorRT-LLM#12988, vllm#26171."""
    with begin() as (world, room):
        other = "d1" if victim == "p0" else "p0"
        world.trip("d1", "read", 5, victim, how)
        at = struck(world)
        assert not world.failed([pair for pair in PAIRS if victim not in pair], BESIDE)
        assert world.until(lambda: other in room.ended, BOUND), f"not noticed: {room}"
        when, state, reason = room.ended[other]
        assert state is KVPoll.Failed
        assert when - at < BOUND
        # the kernel frees a killed process's memory before it closes its connections
        noticed = (
            r"decode(: its connection | was silent)" if other == "p0" else r"rank 0 of prefill"
        )
        assert re.search(noticed, reason), reason
        world.until(lambda: other in room.back, BOUND)
        # reads from a stopped peer may land while it may continue
        quarantined = world.ask(other, "audit")["leases"].quarantined
        kept = (other, how, quarantined) == ("d1", signal.SIGSTOP, {"kv": -(-WHOLE.tokens // 8)})
        assert other in room.back or kept
        if how == signal.SIGKILL:
            world.bury(victim)
            return
        world.signal(victim, signal.SIGCONT)
        state, _ = world.ends(room)[victim]
        # decode may have finished before, which prefill learns only now
        assert state is KVPoll.Failed or room.done == {"d1": 0}
