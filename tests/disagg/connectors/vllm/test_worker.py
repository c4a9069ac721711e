"""Two workers hand requests over, with real endpoints in one process: bytes, block tables, ends."""

import time

import pytest
import torch

from disagg.connectors.vllm.layout import EngineLayout, Group
from disagg.connectors.vllm.scheduler import Decline, Receive, Send, Step
from disagg.connectors.vllm.settings import Settings
from disagg.connectors.vllm.stats import empty, summary, total
from disagg.connectors.vllm.worker import Worker
from kvpool.describe import describe
from kvpool.layout import PoolLayout, Space

BLOCKS, TOKENS = 12, 8


class Side:
    """Blocks of full attention, and states in the same memory, as vLLM's groups lie."""

    def __init__(self, produces, **extra):
        torch.manual_seed(produces)
        self.memory = torch.randint(0, 255, (BLOCKS, TOKENS * 16), dtype=torch.uint8)
        rows = describe(
            self.memory.view(BLOCKS, TOKENS, 16), ("item", "entry", "dim"), role="latent", layer=0,
            space="kv0",
        )  # fmt: skip
        state = describe(
            self.memory[:, :50], ("item", "dim"), role="temporal", layer=1, space="state1"
        )
        spaces = (
            Space("kv0", "paged", TOKENS, block_pool="blocks"),
            Space("state1", "slot", block_pool="blocks"),
        )
        layout = PoolLayout(
            (*rows.buffers, *state.buffers), (*rows.regions, *state.regions), spaces, 2
        )
        groups = Group("kv0", "paged", 1, TOKENS), Group("state1", "slot", 1, TOKENS, "first")
        self.worker = Worker(
            Settings.read(extra),
            EngineLayout(layout, groups),
            produces=produces,
            consumes=not produces,
            ranks=1,
        )
        self.sent, self.received, self.failed = set(), set(), set()

    def step(self, **what):
        """One step of its engine."""
        step = Step(**what)
        self.worker.begin(step)
        self.worker.save(step)
        results = self.worker.results()
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed


@pytest.fixture
def sides():
    pair = Side(True), Side(False)
    yield pair
    for side in pair:
        side.worker.close()


def until(true, *sides):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        for side in sides:
            side.step()


def receive(prefill, room="room", blocks=((0, 4, 5), (7,)), start=0):
    return Receive("d", room, (prefill.worker.prefill.address,), blocks, start, 20)


def send(room="room", start=0, stop=20, last=True):
    return Send("p", room, ((3, 1, 2), (6,)), start, stop, last)


def test_pages_and_states_arrive_in_the_blocks_that_were_named(sides):
    prefill, decode = sides
    before = decode.memory.clone()
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill, blocks=((9, 4, 5), (7,)))])
    until(lambda: "d" in decode.received and "p" in prefill.sent, decode, prefill)
    assert not decode.failed
    expected = before
    for here, there, tokens in ((9, 3, 8), (4, 1, 8), (5, 2, 4)):
        expected[here, : 16 * tokens] = prefill.memory[there, : 16 * tokens]
    expected[7, :50] = prefill.memory[6, :50]
    live = torch.ones_like(expected, dtype=torch.bool)
    live[5, 64:] = False  # dead entries of the last page
    assert torch.equal(decode.memory[live], expected[live])


def test_chunks_are_offered_one_by_one(sides):
    prefill, decode = sides
    decode.step(receives=[receive(prefill, blocks=((9, 4, 5), (7,)))])
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        prefill.step(sends=[send(start=start, stop=stop, last=stop == 20)])
    until(lambda: "d" in decode.received, decode, prefill)
    assert torch.equal(decode.memory[9], prefill.memory[3])
    assert torch.equal(decode.memory[5, :64], prefill.memory[2, :64])


def test_a_declined_room_gives_prefills_blocks_back(sides):
    prefill, decode = sides
    prefill.step(sends=[send()])
    decode.step(declines=[Decline("room", (prefill.worker.prefill.address,))])
    until(lambda: "p" in prefill.sent, decode, prefill)


def test_an_aborted_request_is_reported_once_and_not_as_failed(sides):
    prefill, decode = sides
    decode.step(receives=[receive(prefill, blocks=((9, 4, 5), (7,)))])
    decode.step(aborts=["d"])
    until(lambda: "d" in decode.received, decode)
    assert not decode.failed


def test_a_prefill_that_is_not_there_fails_its_request_only(sides):
    prefill, decode = sides
    prefill.step(sends=[send()])
    nobody = Receive("lost", "other", ("tcp://nonsense",), ((8,), (10,)), 0, 8)
    decode.step(receives=[nobody, receive(prefill, blocks=((9, 4, 5), (7,)))])
    until(lambda: {"d", "lost"} <= decode.received, decode, prefill)
    assert decode.failed == {"lost"}


def test_an_idle_engine_is_no_dead_one():
    """Prefill takes no step for longer than decode waits for a peer that is silent."""
    prefill, decode = Side(True, peer_timeout=0.5), Side(False, peer_timeout=0.5)
    for number in range(2):
        prefill.step(sends=[send(f"room{number}")])
        decode.step(receives=[receive(prefill, f"room{number}", ((9, 4, 5), (7,)))])
        until(lambda: "d" in decode.received, decode)
        decode.received.clear()
        time.sleep(1.5)
    assert not decode.failed
    for side in (decode, prefill):
        side.worker.close()


def test_numbers_of_rooms_add_up(sides):
    prefill, decode = sides
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill, blocks=((9, 4, 5), (7,)))])
    until(lambda: "d" in decode.received and "p" in prefill.sent, decode, prefill)
    read, served = decode.worker.stats.take(), prefill.worker.stats.take()
    assert decode.worker.stats.take() is None
    both = total(total(empty(), read), served)
    assert both["rooms"] == {"read": 1, "served": 1}
    assert both["bytes"] >= 20 * 16 + 50
    assert summary(both)["Rooms read"] == 1


@pytest.mark.parametrize(
    "extra, named", [({"speed": 1}, "speed"), ({"stream": "layers"}, "stream='layers'")]
)
def test_settings_that_are_not_known_are_named(extra, named):
    with pytest.raises(ValueError, match=named):
        Settings.read(extra)
