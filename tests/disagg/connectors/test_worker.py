"""Two workers hand requests over, with real endpoints in one process: bytes, block tables, ends."""

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from disagg.connectors import worker
from disagg.connectors.blocks import BlockGroup
from disagg.connectors.source import Source
from disagg.connectors.steps import Step
from kvpool.describe import describe
from kvpool.layout import PoolLayout, Space
from tests.disagg.connectors.vllm import engines
from tests.disagg.connectors.vllm.engines import until

BLOCKS, TOKENS = 12, 8
LAYERS = {"attention": ("target", 0), "state": ("target", 1)}


class Side(engines.WorkerSide):
    """Blocks of full attention, and states in the same memory, as vLLM's groups lie."""

    def __init__(self, produces, layers=LAYERS, said=None, clears=False, **extra):
        torch.manual_seed(produces)
        self.memory = torch.randint(0, 255, (BLOCKS, TOKENS * 16), dtype=torch.uint8)
        rows, slots = self.memory.view(BLOCKS, TOKENS, 16), self.memory[:, :50]
        kv, state = (
            Space("kv0", "paged", TOKENS, block_pool="blocks"),
            Space("state1", "slot", block_pool="blocks"),
        )
        layout = PoolLayout.of(
            describe(rows, ("item", "entry", "dim"), role="latent", layer=0, space=kv.name),
            describe(slots, ("item", "dim"), role="temporal", layer=1, space=state.name),
            spaces=[kv, state],
        )
        groups = BlockGroup("kv0", 1, TOKENS), BlockGroup("state1", 1, TOKENS, "first")
        extra |= {"cleared": ([rows], [slots])} if clears else {}
        super().__init__(layout, groups, layers, produces=produces, model=said, **extra)


@pytest.fixture
def opened():
    """Makes a side, which is closed when the test has ended."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Side(*args, **options))


@pytest.fixture
def sides(opened):
    return opened(True), opened(False)


HERE = (9, 4, 5), (7,)
NOWHERE = Source("other", ("tcp://nonsense",))


def receive(prefill, room="room", blocks=HERE, start=0):
    return engines.receive(Source(room, (prefill.rank.prefill.address,)), blocks, start, 20)


def send(room="room", start=0, stop=20, last=True):
    return engines.send(((3, 1, 2), (6,)), start, stop, last, room)


def until_there(prefill, decode):
    """Until both are told that the request has come."""
    until(lambda: "d" in decode.received and "p" in prefill.sent, decode, prefill)
    assert not decode.failed


def test_pages_and_states_arrive_in_the_blocks_that_were_named(sides):
    prefill, decode = sides
    before = decode.memory.clone()
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill)])
    until_there(prefill, decode)
    expected = before
    for here, there, tokens in ((9, 3, 8), (4, 1, 8), (5, 2, 4)):
        expected[here, : 16 * tokens] = prefill.memory[there, : 16 * tokens]
    expected[7, :50] = prefill.memory[6, :50]
    live = torch.ones_like(expected, dtype=torch.bool)
    live[5, 64:] = False  # dead entries of the last page
    assert torch.equal(decode.memory[live], expected[live])


@pytest.mark.parametrize("start", [0, 16, 18])
def test_what_no_token_fills_is_no_other_groups_state_where_vllm_leaves_it(start, opened):
    """Of the last block, unless it has tokens of decode's own, and of those behind it."""
    prefill, decode = opened(True), opened(False, clears=True)
    before = decode.memory.clone()
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill, blocks=((9, 4, 5, 2, 0), (7,)), start=start)])
    until_there(prefill, decode)
    assert not decode.memory[2].any()
    tail = torch.zeros(64, dtype=torch.uint8) if start < 18 else before[5, 64:]
    assert torch.equal(decode.memory[5, 64:], tail)
    assert torch.equal(decode.memory[[0, 1, 3, 6, 8]], before[[0, 1, 3, 6, 8]])
    assert torch.equal(decode.memory[7, :50], prefill.memory[6, :50])


class WindowSide(engines.WorkerSide):
    """Blocks of full attention and of a window of 12 tokens, which may move whole."""

    def __init__(self, produces, whole, **extra):
        torch.manual_seed(produces)
        self.memory = torch.randint(0, 255, (BLOCKS, TOKENS, 16), dtype=torch.uint8)
        spaces = [
            Space("kv0", "paged", TOKENS, block_pool="blocks"),
            Space("swa1", "paged", TOKENS, window=12, block_pool="blocks", whole=whole),
        ]
        described = [
            describe(self.memory, ("item", "entry", "dim"), role="k", layer=layer, space=space.name)
            for layer, space in enumerate(spaces)
        ]
        groups = BlockGroup("kv0", 1, TOKENS), BlockGroup("swa1", 1, TOKENS)
        layout = PoolLayout.of(*described, spaces=spaces)
        super().__init__(layout, groups, LAYERS, produces=produces, **extra)


@pytest.mark.parametrize(("there", "whole"), [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("chunks", [(0, 20), (0, 10, 20), (0, 17, 20)])
@pytest.mark.parametrize("extra", [{}, {"verify": "checksum"}])
def test_a_window_that_moves_whole_comes_behind_decodes_own_prefix(there, whole, chunks, extra):
    """vLLM's bounded replay: decode has 16 of 20 tokens, but of the window none."""
    sides = WindowSide(True, bool(there), **extra), WindowSide(False, bool(whole), **extra)
    with sides[0] as prefill, sides[1] as decode:
        before = decode.memory.clone()
        decode.step(receives=[receive(prefill, blocks=((9, 4, 5), (0, 7, 8)), start=16)])
        for start, stop in pairwise(chunks):
            ids = (0 if start >= 16 else 11, 6, 10)[: -(-stop // TOKENS)]
            prefill.step(sends=[engines.send(((3, 1, 2), ids), start, stop, stop == 20)])
        until_there(prefill, decode)
        expected = before
        expected[5, :4], expected[8, :4] = prefill.memory[2, :4], prefill.memory[10, :4]
        if whole:  # tokens 8 to 15, of which none was decode's own
            expected[7] = prefill.memory[6]
        assert torch.equal(decode.memory[:, :4], expected[:, :4])
        assert torch.equal(decode.memory[7], expected[7])


def test_a_request_whose_end_is_told_before_it_is_offered_gives_its_blocks_back(sides):
    """So does vLLM where a drafter runs behind the model."""
    prefill, decode = sides
    step = Step(sends=[send()])
    prefill.worker.begin(step)
    assert not prefill.worker.results(("p",)).sent
    prefill.worker.save(step)
    decode.step(receives=[receive(prefill)])

    def sent():
        prefill.step(())
        return "p" in prefill.sent

    until(sent, decode)


def saved(side, *names, **what):
    """A step in whose forward pass vLLM tells of these layers."""
    step = Step(**what)
    for name in names:
        side.worker.save_layer(name, step)
        yield
    side.worker.save(step)


def ready(decode, layer):
    return lambda: decode.rank.decode.layer_ready("room", layer)


@pytest.mark.parametrize("told", [("attention", "state"), ("state",), ("attention", "shared", "x")])
def test_a_layer_is_there_before_the_pass_that_computes_it_has_ended(sides, told):
    """Layers of which vLLM does not tell come with the end of the pass, others when it tells."""
    prefill, decode = sides
    decode.step(receives=[receive(prefill)])
    list(saved(prefill, "attention", sends=[send(stop=16, last=False)]))
    first = LAYERS[told[0]][1]
    for _ in saved(prefill, *told, sends=[send(start=16)]):
        until(ready(decode, first), decode, turns=prefill)
        assert "d" not in decode.received
    until_there(prefill, decode)
    assert torch.equal(decode.memory[9], prefill.memory[3])
    assert torch.equal(decode.memory[7, :50], prefill.memory[6, :50])


def test_layers_of_one_number_are_offered_once_all_were_computed(opened):
    layers = {"keys": ("target", 0), "index": ("target", 0), "state": ("target", 1)}
    prefill, decode = opened(True, layers=layers), opened(False)
    decode.step(receives=[receive(prefill)])
    passed = saved(prefill, "keys", "state", "index", sends=[send()])
    next(passed), next(passed)
    until(ready(decode, 1), decode, turns=prefill)
    assert not ready(decode, 0)()
    next(passed)
    until(ready(decode, 0), decode, turns=prefill)
    assert not list(passed)
    until(lambda: "d" in decode.received, decode, prefill)


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_preemption_ends_what_was_offered_before_and_nothing_after(sides, by_layer):
    """vLLM begins a step's loads behind its forward pass, or before it."""
    prefill, decode = sides
    prefill.step(sends=[send("first", stop=16, last=False)])
    decode.step(receives=[receive(prefill, "again")])
    again = {"aborts": ["p"], "sends": [send("again")]}
    if by_layer:
        list(saved(prefill, "attention", "state", **again))
    else:
        prefill.step(**again)
    until_there(prefill, decode)
    assert prefill.rank.prefill.leases().leased == {}


def test_a_step_waits_for_the_layers_that_it_begins_with(sides):
    prefill, decode = sides
    step = Step(receives=[replace(receive(prefill), waits=True)])
    prefill.step(sends=[send()])  # its thread answers from here on
    decode.worker.begin(step)
    decode.worker.wait_layer("attention")
    assert torch.equal(decode.memory[9], prefill.memory[3])
    decode.worker.wait_layer("shares the state of another layer")
    decode.worker.save(step)
    results = decode.worker.results(())
    assert not results.received and not decode.worker.invalid_blocks()


def test_blocks_of_a_step_whose_state_does_not_come_are_told(opened):
    prefill, decode = opened(True), opened(False, peer_timeout=0.5)
    one = receive(prefill, start=8)
    nobody = replace(one, request="lost", source=NOWHERE)
    step = Step(receives=[replace(each, waits=True) for each in (one, nobody)])
    decode.worker.begin(step)
    prefill.rank.close()
    decode.worker.wait_layer("attention")
    decode.worker.save(step)
    results = decode.worker.results(())
    assert not results.received and not results.failed
    assert decode.worker.invalid_blocks() == {4, 5}
    assert not decode.worker.invalid_blocks()


def test_a_room_that_ends_while_its_request_is_computed_is_told_when_that_has_finished(sides):
    """vLLM ends the engine if it is told of a request that runs."""
    prefill, decode = sides
    prefill.step((), sends=[send(stop=8, last=False)])
    decode.step(receives=[receive(prefill)])
    decode.step(aborts=["d"])
    leases = prefill.rank.prefill.leases
    until(lambda: not leases().leased, decode, turns=prefill)
    prefill.step((), sends=[send(start=8)])
    assert not prefill.sent and not leases().leased
    prefill.step(("p",))
    assert prefill.sent == {"p"}


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_cannot_be_offered_gives_all_its_blocks_back(sides, begun, caplog):
    prefill, decode = sides
    decode.step(receives=[receive(prefill)])
    if begun:
        prefill.step(sends=[send(stop=8, last=False)])
    prefill.step(sends=[send(start=16), send("other", stop=16, last=False)])
    assert prefill.sent == {"p"}
    assert "request p cannot be handed over: room 'room'" in caplog.text
    assert set(prefill.rank.prefill.leases().leased.values()) == {1, 2}  # those of the other
    if begun:
        until(lambda: "d" in decode.failed, decode, prefill)


def test_a_declined_room_gives_prefills_blocks_back(sides):
    prefill, decode = sides
    prefill.step(sends=[send()])
    decode.step(declines=[Source("room", (prefill.rank.prefill.address,))])
    until(lambda: "p" in prefill.sent, decode, prefill)


def test_an_aborted_request_is_reported_once_and_not_as_failed(sides):
    prefill, decode = sides
    decode.step(receives=[receive(prefill)])
    decode.step(aborts=["d"])
    until(lambda: "d" in decode.received, decode)
    assert not decode.failed


def test_a_prefill_that_is_not_there_fails_its_request_only(sides):
    prefill, decode = sides
    prefill.step(sends=[send()])
    nobody = replace(receive(prefill, blocks=((8,), (10,))), request="lost", source=NOWHERE, stop=8)
    decode.step(receives=[nobody, receive(prefill)])
    until(lambda: {"d", "lost"} <= decode.received, decode, prefill)
    assert decode.failed == {"lost"}


def test_an_idle_engine_is_no_dead_one(opened):
    """Prefill takes no step for longer than decode waits for a peer that is silent."""
    prefill, decode = (opened(produces, peer_timeout=0.5) for produces in (True, False))
    for number in range(2):
        prefill.step(sends=[send(f"room{number}")])
        decode.step(receives=[receive(prefill, f"room{number}")])
        until(lambda: "d" in decode.received, decode)
        decode.received.clear()
        time.sleep(0.8)
    assert not decode.failed


@pytest.fixture
def patience(monkeypatch):
    """A step in which nothing is computed waits for longer than a test may take."""
    monkeypatch.setattr(worker, "IDLE_SECONDS", 3600.0)


def test_a_step_that_computes_nothing_ends_with_the_room_that_it_waits_for(sides, patience):
    prefill, decode = sides
    decode.step(receives=[receive(prefill)])
    prefill.step(sends=[send()], idle=True)
    assert prefill.sent == {"p"}
    decode.step(idle=True)
    assert decode.received == {"d"} and not decode.failed


def test_a_step_that_computes_nothing_waits_for_nothing_that_has_ended(sides, patience):
    prefill, decode = sides
    decode.step(idle=True)
    nobody = replace(receive(prefill), source=NOWHERE)
    decode.step(receives=[nobody], idle=True)
    assert decode.failed == {"d"}
    decode.step(idle=True)


ROPE = {"rope_theta": 10000.0, "model": "llama"}, {"rope_theta": 500000.0, "model": "llama"}
UNSAID = {"rope_theta": None}


def test_a_model_with_another_rotary_embedding_is_refused_in_both_logs(opened, caplog):
    prefill, decode = (opened(each, said=ROPE[not each]) for each in (True, False))
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill)])
    until(lambda: "d" in decode.failed and "p" in prefill.sent, decode, prefill)
    said = "rope_theta: 10000.0 on prefill, 500000.0 on decode. Run the same model"
    assert f"request d was not received: decode: {said}" in caplog.text
    assert f"a decode engine cannot read from here: {said}" in caplog.text


def test_a_user_may_say_that_something_is_not_compared(opened):
    prefill = opened(True, said=ROPE[0])
    decode = opened(False, said=ROPE[1], conventions=UNSAID)
    prefill.step(sends=[send()])
    decode.step(receives=[receive(prefill)])
    until_there(prefill, decode)
