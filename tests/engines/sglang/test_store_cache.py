"""SGLang's radix cache over a store: real pools, allocators and tree, without an engine."""

from __future__ import annotations

import threading
import time
from array import array

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.mm_utils import hash_feature, pad_mm_tokens
from sglang.srt.managers.schedule_batch import (
    MM_PAD_SHIFT_VALUE,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    Req,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from disagg.connectors.sglang_store.requests import PAD, keyed_tokens
from disagg.store.floors import open_floor
from tests.engines.sglang import sides
from tests.engines.sglang.caches import CHUNK, Engine, Side, contexts
from tests.engines.vllm.engines import prompts


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 601)
    with contexts():
        yield


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
@pytest.mark.parametrize(("there", "here"), [(1, 16), (16, 1), (64, 16)])
def test_a_prompt_that_another_engine_has_computed_is_read(kind, there, here, core, tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    with Side(url, there, kind=kind, core=core) as writes:
        assert writes.serves(prompt) == 0
        assert writes.whole()
    with Side(url, here, kind=kind, core=core) as reads:
        req = reads.request(prompt)
        assert reads.waits(req) == 299 // CHUNK * CHUNK
        assert reads.holds(req)
        reads.computes(req)
        reads.ends(req)
        assert reads.whole()
        assert reads.store.stats().counts["written"] == 0


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)])
def test_states_of_linear_attention_are_read_where_a_chunk_ended(ranks, core, tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    with Engine(url, ranks[0], kind="hybrid", page=1, core=core) as writes:

        def computed(side):
            req = side.request(prompt)
            side.waits(req)
            for stop in (CHUNK, 150, 3 * CHUNK, 300):  # at 128 there is none
                side.computes(req, stop)
            side.ends(req)
            return side.whole()

        assert all(writes.each(computed))
    for length, cached in ((300, 192), (190, 64), (60, 0)):
        with Engine(url, ranks[1], kind="hybrid", page=1, core=core) as reads:

            def read(side, length=length, cached=cached):
                req = side.request(prompt[:length])
                assert side.waits(req) == cached
                assert not cached or side.holds(req)
                side.computes(req)
                side.ends(req)
                return side.whole()

            assert all(reads.each(read))


@pytest.fixture
def written(tmp_path):
    """The URL of a store with a prompt's chunks, and the prompt."""
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    with Side(url) as writes:
        writes.serves(prompt)
    return url, prompt


HIT = 299 // CHUNK * CHUNK


def test_what_is_read_is_read_once_and_said(written):
    url, prompt = written
    with Side(url) as side:
        req = side.request(prompt)
        assert side.waits(req) == HIT
        told = side.cache.pop_prefetch_loaded_span(req.cache_request_handle)
        assert told == (HIT, 0)
        again = side.request(prompt)
        assert not side.cache.has_pending_cache_operations()  # the tree has all that there is
        assert side.begins(again) == HIT
        assert side.store.stats().counts["hit"] == 1


def test_what_the_tree_has_is_not_read_again(written):
    url, prompt = written
    with Side(url) as side:
        assert side.serves(prompt[:100]) == CHUNK  # 64, read; the tree then has 96 tokens
        req = side.request(prompt)
        assert side.waits(req) == HIT
        assert side.cache.pop_prefetch_loaded_span(req.cache_request_handle) == (HIT - 96, 96)
        assert side.holds(req)
        side.computes(req)
        side.ends(req)
        assert side.whole()


def test_numbers_that_are_no_tokens_are_computed(written):
    url, prompt = written
    with Side(url) as side:
        req = side.request([1 << 31, *prompt[1:]])
        assert side.waits(req) == 0
        side.computes(req)
        side.ends(req)
        assert side.whole()
        stats = side.store.stats()
        assert (stats.counts["miss"], stats.counts["written"]) == (1, 0)
        assert stats.reasons["miss"] == "tokens: 0 to 2**31 - 1, got 2147483648."


def test_two_requests_that_read_the_same_leave_one_of_it(written):
    url, prompt = written
    with Side(url) as side:
        first, second = side.request(prompt), side.request([*prompt[:-1], 7])
        assert side.waits(first) == side.waits(second) == HIT
        assert side.holds(second)
        assert side.whole()


def test_generated_tokens_are_written_when_a_request_ends(written):
    url, prompt = written
    with Side(url) as side:
        req = side.request(prompt)
        side.waits(req)
        side.computes(req)
        for token in range(40):  # as decode: a slot a token, which no checkpoint has seen
            req.output_ids.append(token)
            stop = len(prompt) + token + 1
            slot = side.requests.req_to_token[req.kv.req_pool_idx, stop - 2] + 1
            if (stop - 1) % side.page == 0:
                slot = side.allocator.alloc(side.page)[0]
            side.requests.write((req.kv.req_pool_idx, slice(stop - 1, stop)), slot.reshape(1))
            side.fill(slot.reshape(1).to(int), range(stop - 1, stop))
            req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        side.ends(req)
        assert side.whole()
        turn = [*prompt, *range(40), 5]
    with Side(url, 1) as side:
        req = side.request(turn)
        assert side.waits(req) == 5 * CHUNK
        assert side.holds(req)


@pytest.mark.parametrize("salts", [({"salt": "a"}, {}), ({"salt": "a"}, {"salt": "b"}),
                                   ({"extra": "a"}, {"salt": "a"}), ({}, {"extra": "a"})],
                         ids=str)  # fmt: skip
def test_another_tenant_reads_nothing(salts, tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    theirs, ours = salts
    with Side(url) as writes:
        writes.serves(prompt, **theirs)
    with Side(url) as reads:
        assert reads.serves(prompt, **ours) == 0
    with Side(url) as reads:
        assert reads.serves(prompt, **theirs) == HIT


OTHERS = {
    "lora_id": "adapter",
    "input_embeds": [[0.0]],
    "token_type_ids": [1],
    "beam_group": object(),
    "skip_radix_cache_insert": True,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_key_is_neither_read_nor_written(name, written, tmp_path):
    url, prompt = written
    with Side(url) as side:
        req = side.request(prompt, **{name: OTHERS[name]})
        assert not side.cache.has_pending_cache_operations()
        (other,) = prompts(300, seed=2)
        req = side.request(other)
        side.waits(req)
        setattr(req, name, OTHERS[name])
        side.computes(req)
        assert not any(side.store.stats().counts[each] for each in ("written", "already there"))


PICTURE = 150
"""Where it begins, in the third chunk."""


def shows(prompt, picture, **said):
    """The tokens of a prompt with a picture, as SGLang's scheduler has them, and the picture."""
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(PICTURE, PICTURE + 63)], **said)
    item.set_hash(picture)
    inputs = MultimodalInputs(mm_items=[item], im_token_id=7)
    ids = array("q", [*prompt[:PICTURE], *[7] * 64, *prompt[PICTURE + 64 :]])
    return pad_mm_tokens(ids, inputs), inputs


def test_of_prompts_with_pictures_what_is_before_the_first_is_shared(tmp_path):
    (prompt,), url, before = prompts(300), f"file://{tmp_path}", PICTURE // CHUNK * CHUNK
    tokens, picture = shows(prompt, picture=1)
    with Side(url) as writes:
        req = writes.request(tokens, multimodal_inputs=picture)
        assert writes.waits(req) == 0
        writes.computes(req)
        writes.ends(req)
        assert writes.whole()
        assert writes.store.stats().counts["written"] == before // CHUNK
    tokens, other = shows(prompt, picture=2)
    for ids, inputs in ((tokens, other), (array("q", prompt), None)):
        with Side(url) as reads:
            req = reads.request(ids, multimodal_inputs=inputs)
            assert reads.waits(req) == before
            assert reads.holds(req)


def test_pictures_whose_place_is_not_known_have_no_keys(tmp_path):
    (prompt,) = prompts(300)
    tokens, picture = shows(prompt, picture=1)
    assert PAD == MM_PAD_SHIFT_VALUE <= min(picture.mm_items[0].padding_values())
    req = Req("r", "", tokens, SamplingParams(), vocab_size=1000)
    assert keyed_tokens(req) > len(tokens)
    req.multimodal_inputs = picture
    assert keyed_tokens(req) == PICTURE
    picture.mm_items[0].offsets = [(200, 210)]  # beside its pad values
    assert keyed_tokens(req) == PICTURE
    picture.mm_items[0].offsets = None
    assert keyed_tokens(req) == 0


def test_what_sglang_has_of_a_picture_is_no_name_of_it():
    """Pictures of other shapes, which have other positions, have one number; a request may choose
    it.
    """
    blank = torch.ones(64, 12)
    assert hash_feature(blank) == hash_feature(blank.reshape(32, 24))
    assert hash_feature(blank) < 1 << 64
    assert "mm_hashes" in GenerateReqInput.__dataclass_fields__


def test_damage_is_computed_and_written_again(written, tmp_path):
    url, prompt = written
    path = next(tmp_path.glob("*/*/*.full"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with Side(url) as side:
        assert side.serves(prompt) == 0
        assert side.whole()
        assert side.store.stats().counts["damaged"] == 1
        assert side.store.stats().counts["read"] == 0
    with Side(url) as side:
        assert side.serves(prompt) == HIT


class Hung:
    """A floor that answers no more once it is told to hang."""

    def __init__(self, floor):
        self._floor, self.go = floor, threading.Event()
        self.go.set()

    def __getattr__(self, name):
        def call(*given):
            assert self.go.wait(20)
            return getattr(self._floor, name)(*given)

        return call


@pytest.fixture
def hung(monkeypatch):
    floors = []
    monkeypatch.setattr(
        "disagg.store.store.open_floor",
        lambda url: floors.append(Hung(open_floor(url))) or floors[-1],
    )
    yield floors
    for floor in floors:
        floor.go.set()


def test_a_floor_that_hangs_holds_up_nobody_else(written, hung):
    url, prompt = written
    with Side(url, timeout=0.5) as side:
        hung[0].go.clear()
        waiting, (other,) = side.request(prompt), prompts(60, seed=2)
        assert side.serves(other) == 0  # too short to be in the store
        assert not side.cache.check_prefetch_progress(waiting.cache_request_handle)
        assert side.waits(waiting) == 0
        assert side.store.stats().counts["unreachable"] == 1
        assert side.whole()


def reading(side, req, hung):
    """Steps until a request is read, of which nothing comes."""
    asked = side.cache.flows.get(req.cache_request_handle)
    while asked.hit is None:
        side.cache.flows.turn()
    hung[0].go.clear()
    side.cache.check_hicache_events()
    assert asked.place is not None


def test_a_read_that_is_late_writes_nothing_later(written, hung):
    url, prompt = written
    with Side(url, timeout=0.5) as side:
        req = side.request(prompt)
        reading(side, req, hung)
        assert side.waits(req) == 0
        assert side.store.stats().counts["late"] == 1
        assert side.whole()
        before = [tensor.clone() for _, tensor, _ in side.tensors()]
        hung[0].go.set()
        side.store.timeout = 20.0
        assert side.store.lookup(prompt) == HIT  # by the threads that would have read
        assert all(t.equal(was) for (_, t, _), was in zip(side.tensors(), before))


@pytest.mark.parametrize("steps", range(4))
def test_an_aborted_request_leaves_no_slot_behind(steps, written):
    url, prompt = written
    with Side(url) as side:
        req = side.request(prompt)
        for _ in range(steps):
            side.cache.check_hicache_events()
            time.sleep(0.02)
        side.cache.release_aborted_request(req.cache_request_handle)
        assert side.whole()


def test_a_pool_that_is_full_of_others_makes_room_when_the_request_may_begin(written, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 24)  # of 16: 368 tokens
    url, prompt = written
    with Side(url) as side:
        (other,) = prompts(330, seed=2)
        side.serves(other)
        req = side.request(prompt)
        for _ in range(20):
            side.cache.check_hicache_events()
            time.sleep(0.005)
        assert side.cache.evictable_size() == 320  # nobody gave way to what only waits
        assert side.waits(req) == HIT
        assert side.holds(req)
        assert side.whole()


def test_a_prompt_for_which_the_pool_is_too_small_is_computed(written, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 15)
    url, prompt = written
    with Side(url) as side:
        assert side.waits(side.request(prompt)) == 0
        assert side.whole()


def test_other_weights_turn_it_off(written):
    url, prompt = written
    with Side(url) as side:
        reading = side.request(prompt)
        side.cache.turn_off("its weights were updated.")
        assert side.waits(reading) == 0
        (other,) = prompts(300, seed=2)
        assert side.serves(other) == 0
        assert not side.store.stats().counts["written"]
        assert side.whole()


def test_a_reset_ends_what_is_read(written, hung):
    url, prompt = written
    with Side(url) as side:
        reading(side, side.request(prompt), hung)
        assert side.allocator.available_size() == side.allocator.size - HIT
        side.cache.reset()
        assert side.whole()
        hung[0].go.set()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_ranks_read_what_another_number_of_ranks_has_written(kind, ranks, tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    with Engine(url, ranks[0], kind=kind) as writes:
        assert writes.each(lambda side: side.serves(prompt)) == [0] * ranks[0]
    with Engine(url, ranks[1], kind=kind, page=1) as reads:

        def read(side):
            req = side.request(prompt)
            assert side.waits(req) == HIT
            return side.holds(req) and side.whole()

        assert all(reads.each(read))


@pytest.mark.parametrize("silent", [0, 1])
def test_what_is_late_on_one_rank_is_computed_by_all(silent, written, hung):
    url, prompt = written
    with Engine(url, 2, timeout=1.0) as both:
        floor = hung[silent]

        def read(side):
            req = side.request(prompt)
            if side is both.sides[0]:
                flow = side.cache.flows.get(req.cache_request_handle)
                while flow.hit is None:
                    side.cache.flows.turn()
                floor.go.clear()
            return side.waits(req), side.whole()

        assert both.each(read) == [(0, True)] * 2
        late = [side.store.stats().counts["late"] for side in both.sides]
        assert late[silent] == 1


def test_chunks_of_a_prompt_are_written_as_they_are_computed(tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    for kind in ("mha", "swa"):
        with Side(url, kind=kind) as side:
            req = side.request(prompt)
            side.waits(req)
            for stop in (80, 160, 240, 300):
                side.computes(req, stop)
                side.written()
                assert side.store.lookup(prompt) == stop // CHUNK * CHUNK
            side.ends(req)
            assert side.whole()
        with Side(url, 1, kind=kind) as side:
            for length, cached in ((130, 128), (200, 192), (300, 256)):
                req = side.request(prompt[:length])
                assert side.waits(req) == cached
                assert side.holds(req)
