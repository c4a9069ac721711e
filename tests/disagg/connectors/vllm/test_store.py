"""Which of vLLM's requests are read from a store and written to it, as vLLM has them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from disagg.connectors.settings import Settings
from disagg.connectors.store.media import media_digest
from disagg.connectors.vllm.scheduler import ConnectorScheduler
from disagg.connectors.vllm_store.engine import cached_unit, stored_requests
from disagg.connectors.vllm_store.media import encoder
from disagg.connectors.vllm_store.requests import StoredRequests
from tests.disagg.connectors.store import engines
from tests.disagg.connectors.store.engines import CHUNK
from tests.disagg.store.stores import fresh

GROUPS = SimpleNamespace(
    select_transfer_block_ids=lambda ids: [ids[group] for group in (0, 2)],
    transfer_group_ids=(0, 2),
)
"""Of three groups the second is not handed over."""


def request(name, tokens, **said):
    ids = list(tokens)
    return SimpleNamespace(
        **{
            "request_id": name,
            "prompt_token_ids": ids,
            "all_token_ids": ids,
            "num_prompt_tokens": len(ids),
            "num_computed_tokens": 0,
            "prompt_embeds": None,
            "pooling_params": None,
            "lora_request": None,
            "resumable": False,
            "mm_features": [],
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            "kv_transfer_params": None,
            "trace_headers": None,
            "status": SimpleNamespace(name="FINISHED_STOPPED"),
            **said,
        }
    )


def output(counts, blocks=((1, 2), (9,), (3, 4)), offers=None, resumed=(), new=()):
    """What vLLM says of a step: tokens by request."""
    state = SimpleNamespace(
        resolve_block_ids=lambda name: blocks, boundary_state_offloads=offers or {}
    )
    running = SimpleNamespace(
        req_ids=[name for name in counts if name not in new], resumed_req_ids={*resumed}
    )
    return SimpleNamespace(
        num_scheduled_tokens=counts, kv_connector_block_state=state, scheduled_cached_reqs=running
    )


class Requests(StoredRequests):
    """Over a store of one rank that is in no engine."""

    def __init__(self, url=None, **options):
        self.side = engines.Engine(url or fresh(), state=False)
        super().__init__(self.side.settings, GROUPS, **options)
        layout = self.side.layout.to_msgpack()
        self.open([SimpleNamespace(layout=layout, conventions={"weights": "w"})])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.side.__exit__()
        self.close()

    def known(self, asked, computed=0):
        until = time.monotonic() + 20
        while (more := self.matched(asked, computed)[0]) is None:
            assert time.monotonic() < until
        return more

    def writes(self, name, count):
        self.scheduled(output({name: count}))
        return self.step().writes


PROMPT = range(100, 160)


@pytest.mark.parametrize(
    ("said", "settles"),
    [
        ({"counts": {"r": 1}}, False),
        ({"counts": {"r": 1, "other": 1}, "new": ("other",)}, False),
        ({"counts": {}}, True),  # it has ended, or is preempted
        ({"counts": {"other": 1}}, True),
        ({"counts": {"r": 1}, "resumed": ("r",)}, True),
        ({"counts": {"r": 1}, "new": ("r",)}, True),  # another of that name
    ],
)
def test_blocks_that_are_not_kept_are_copied_before_the_next_step(said, settles):
    with Requests() as store:
        asked = request("r", PROMPT)
        store.arrived(asked)
        store.known(asked)
        assert store.writes("r", 32)
        assert not store.step().settles
        store.scheduled(output(**said))
        assert store.step().settles == settles
        store.scheduled(output({}))
        assert store.step().settles != settles


@pytest.mark.parametrize(
    "said",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"pooling_params": object()},
        {"resumable": True},
        {"lora_request": SimpleNamespace(load_inplace=False, lora_path="organisation/adapter")},
        {"lora_request": SimpleNamespace(load_inplace=True, lora_path="FOLDER")},
    ],
    ids=["embeds", "no ids", "pooling", "session", "remote adapter", "adapter in place"],
)
def test_a_request_of_which_nothing_says_what_it_is_is_neither_read_nor_written(said, tmp_path):
    lora = said.get("lora_request")
    if lora is not None and lora.lora_path == "FOLDER":
        (tmp_path / "adapter_model.bin").write_bytes(b"w")
        lora.lora_path = str(tmp_path)
    with Requests() as store:
        asked = request("r", PROMPT, **said)
        for _ in range(3):
            store.arrived(asked)
            time.sleep(0.02)  # a digest would be known by now
        assert store.matched(asked, 0) == (0, False)
        assert store.writes("r", 60) == []
        store.finished(asked)


def keys(store, name, **said):
    """The keys under which the chunks of the prompt are written."""
    asked = request(name, PROMPT, **said)
    store.arrived(asked)
    store.known(asked)
    (write,) = store.writes(name, 60)
    store.finished(asked)
    return write.keys


def test_keys_say_whose_a_request_is(tmp_path):
    with Requests() as store:
        lora = SimpleNamespace(load_inplace=False, lora_path=str(tmp_path))
        (tmp_path / "adapter_model.bin").write_bytes(b"w")
        store.arrived(request("first", PROMPT, lora_request=lora))
        until = time.monotonic() + 20
        while store._adapters.digest(str(tmp_path)) is None:
            assert time.monotonic() < until
        plain, tenant = keys(store, "a"), keys(store, "b", cache_salt="tenant")
        adapter = keys(store, "c", lora_request=lora)
        both = keys(store, "d", lora_request=lora, cache_salt="tenant")
        named = keys(store, "e", cache_salt='["", ""]')
        assert len({*plain, *tenant, *adapter, *both, *named}) == 5 * 3
        assert plain == store.side.scheduler._store.keys(list(PROMPT)).keys
        assert tenant == store.side.scheduler._store.keys(list(PROMPT), "tenant").keys


HEX = "0123456789abcdef" * 4
ENCODER = "what the model makes of pictures"


class Item:
    """A picture, as vLLM's processors have made it."""

    def __init__(self, **values):
        self.values = values

    def get_data(self):
        return self.values


def picture(offset, pixels, length=10, *, name=HEX, **said):
    """A picture in a prompt, as vLLM's scheduler has it."""
    return SimpleNamespace(
        **{
            "data": Item(pixel_values=torch.full((200,), pixels), grid=torch.tensor([1, 2, 5])),
            "modality": "image",
            "identifier": name,
            "mm_hash": name,
            "mm_position": SimpleNamespace(offset=offset, length=length, is_embed=None),
            **said,
        }
    )


def written(store, name, *pictures, **said):
    """The keys under which the chunks of the prompt with pictures are written."""
    asked = request(name, PROMPT, mm_features=list(pictures), **said)
    store.arrived(asked)
    until = time.monotonic() + 20
    while store.matched(asked, 0)[0] is None:
        assert time.monotonic() < until
    writes = store.writes(name, 60)
    store.finished(asked)
    return writes[0].keys if writes else ()


def test_keys_say_what_a_picture_shows():
    with Requests(encoder=ENCODER) as store, Requests(encoder="another") as other:
        plain, one = written(store, "a"), written(store, "b", picture(20, 1.0))
        assert one[:1] == plain[:1] and len(one) == 3
        assert not {*one[1:]} & {*plain}
        assert written(store, "c", picture(20, 1.0)) == one
        for number, changed in enumerate(
            (
                picture(20, 2.0),
                picture(20, 1.0, name=HEX[::-1]),
                picture(20, 1.0, modality="video"),
                picture(21, 1.0),
                picture(20, 1.0, length=11),
                picture(
                    20,
                    1.0,
                    mm_position=SimpleNamespace(offset=20, length=10, is_embed=[True, False]),
                ),
            )
        ):
            keys = written(store, f"d{number}", changed)
            assert keys[:1] == one[:1] and not {*keys[1:]} & {*one}
        keys = written(other, "e", picture(20, 1.0))
        assert keys[:1] == one[:1] and not {*keys[1:]} & {*one}
        two = written(store, "f", picture(40, 2.0), picture(20, 1.0))
        assert two[:2] == one[:2] and two[2] != one[2]
        assert written(store, "g", picture(20, 1.0), picture(40, 2.0)) == two
        swapped = written(store, "h", picture(20, 2.0), picture(40, 1.0))
        assert swapped[:1] == one[:1] and not {*swapped[1:]} & {*two}


@pytest.mark.parametrize(
    ("said", "makes"),
    [
        ({"name": "my picture"}, ENCODER),
        ({"name": HEX.upper()}, ENCODER),
        ({"name": HEX[:-1]}, ENCODER),
        ({"name": f"{HEX}\n"}, ENCODER),
        ({"name": "renderer0-mm-3-image-0"}, ENCODER),
        ({"name": "0123abcd-0123-4567-89ab-0123456789ab"}, ENCODER),
        ({"mm_hash": None}, ENCODER),
        ({"identifier": f"adapter:{HEX}"}, ENCODER),
        ({"data": None}, ENCODER),
        ({"data": Item(pixel_values=[torch.ones(200)], more=object())}, ENCODER),
        ({"data": Item(grid=torch.tensor([1, 2, 5]), seconds=[torch.ones(1)])}, ENCODER),
        ({"data": Item(address=1, signature=[2])}, ENCODER),
        ({"length": 0}, ENCODER),
        ({}, None),
    ],
)
def test_before_a_picture_that_has_no_key_chunks_are_written_and_from_there_on_none(said, makes):
    with Requests(encoder=makes) as store:
        plain = written(store, "a")
        unknown = picture(2 * CHUNK + 3, 1.0, **said)
        assert written(store, "b", picture(50, 1.0), unknown) == plain[:2]
        if makes is not None:
            known = picture(20, 1.0)
            assert written(store, "c", unknown, known) == written(store, "d", known)[:2]


SEES = {
    "model_type": "seer",
    "_name_or_path": "/models/seer",
    "transformers_version": "5.19.0",
    "text_config": {"hidden_size": 256},
    "vision_config": {"hidden_size": 64, "dtype": "bfloat16", "id2label": {0: "a", 1: "b"}},
    "vision_feature_layer": -2,
}


def sees(fields=SEES, *, encoders=None, encoder_decoder=False, **options):
    """What keys say of an engine with such a model."""
    options = {"mm_processor_cache_type": "lru", **options}
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: fields),
        is_encoder_decoder=encoder_decoder,
        multimodal_config=SimpleNamespace(**options),
    )
    return encoder(SimpleNamespace(model_config=model, ec_transfer_config=encoders))


def test_keys_say_what_a_model_makes_of_pictures_and_not_where_it_lies():
    moved = {**SEES, "_name_or_path": "other", "transformers_version": "6", "text_config": {}}
    moved["vision_config"] = {**SEES["vision_config"], "dtype": "float32"}
    assert sees() == sees(moved) == sees(video_pruning_rate=None)
    others = [
        sees({**SEES, "vision_feature_layer": -1}),
        sees({**SEES, "vision_config": {"hidden_size": 32}}),
        sees(video_pruning_rate=0.5),
        sees(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        sees(mm_encoder_attn_dtype="fp8"),
    ]
    assert len({sees(), *others}) == 6


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"encoders": object()}, "encoders are other engines'"),
        ({"encoder_decoder": True}, "no place in the prompt"),
        ({"mm_processor_cache_type": "shm"}, "use lru"),
    ],
)
def test_what_is_not_known_of_pictures_is_said_at_start(said, words, caplog):
    assert sees(**said) is None
    assert words in caplog.text


def test_an_adapter_that_changes_encoders_has_other_keys(tmp_path):
    lora = SimpleNamespace(load_inplace=False, lora_path=str(tmp_path), lora_name="one")
    same = SimpleNamespace(load_inplace=False, lora_path=str(tmp_path), lora_name="two")
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    with Requests(encoder=ENCODER) as store:
        store.arrived(request("first", PROMPT, lora_request=lora))
        until = time.monotonic() + 20
        while store._adapters.digest(str(tmp_path)) is None:
            assert time.monotonic() < until
        plain = written(store, "a", picture(20, 1.0))
        text = written(store, "b", picture(20, 1.0), lora_request=lora)
        tower = written(store, "c", picture(20, 1.0, identifier=f"one:{HEX}"), lora_request=lora)
        again = written(store, "d", picture(20, 1.0, identifier=f"two:{HEX}"), lora_request=same)
        assert len(plain) == len(text) == len(tower) == 3
        assert text[0] == tower[0] != plain[0] and again == tower
        assert not {*text[1:]} & {*tower[1:]}


def test_until_pictures_are_known_a_request_waits_and_others_go_on(monkeypatch):
    gate = threading.Event()
    module = "disagg.connectors.store.media.media_digest"
    monkeypatch.setattr(module, lambda value: gate.wait(20) and media_digest(value))
    with Requests(encoder=ENCODER) as store:
        asked = request("r", PROMPT, mm_features=[picture(20, 1.0)])
        store.arrived(asked)
        assert store.matched(asked, 0) == (None, False)
        assert len(keys(store, "other")) == 3
        assert store.writes("r", 30) == []  # as of a hand-off, which does not wait
        gone = request("gone", PROMPT, mm_features=[picture(20, 1.0)])
        store.arrived(gone)
        store.finished(gone)
        gate.set()
        until = time.monotonic() + 20
        asked.num_computed_tokens = 30
        while not (writes := store.writes("r", 30)):
            assert time.monotonic() < until
        assert (writes[0].first, len(writes[0].keys)) == (0, 3)
        store.finished(asked)
        assert store.matched(gone, 0) == (0, False)


def test_blocks_of_the_groups_that_are_transferred_are_read_and_written():
    url = fresh()
    with Requests(url) as store, engines.Engine(url, state=False) as other:
        other.scheduler.arrived("w", list(PROMPT), "")
        table = other.blocks(60, whole=True)
        other.compute("w", list(PROMPT), table, 0, 60)
        other.written()
        asked = request("r", [*PROMPT, 7])
        store.arrived(asked)
        more = store.known(asked)
        assert more == 3 * CHUNK
        assert store.matched(asked, 0) == (more, True)
        store.allocated(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2], [9], [3, 4])), more)
        (read,) = store.step().reads
        assert (read.request, read.start, read.stop) == ("r", 0, more)
        assert read.blocks == ((1, 2), (3, 4))
        store.allocated(asked, SimpleNamespace(get_block_ids=lambda: None), 0)  # it has come
        told = SimpleNamespace(finished_recving={"r"}, failed_recving={"r"})
        store.received(told)
        assert store.matched(asked, 0) == (0, False)
        asked.num_computed_tokens = 4
        (write,) = store.writes("r", 50)
        assert (write.first, len(write.keys), write.computed) == (0, 3, 54)
        assert write.blocks == ((1, 2), (3, 4))


def test_logits_of_a_prompt_are_computed_and_stored():
    with Requests() as store:
        asked = request("r", PROMPT, skip_reading_prefix_cache=True)
        store.arrived(asked)
        assert store.matched(asked, 0) == (0, False)
        assert len(store.writes("r", 60)) == 1


def test_states_are_written_from_the_blocks_that_vllm_offers():
    with Requests() as store:
        asked = request("r", PROMPT)
        store.arrived(asked)
        store.known(asked)
        offers = {"r": [(2, 77, 2 * CHUNK), (2, 78, 40), (2, 79, 64)], "gone": [(2, 1, 16)]}
        store.scheduled(output({"r": 60}, offers=offers))
        (write,) = store.step().writes
        assert write.states == {2 * CHUNK: {1: 77}}
        asked.num_computed_tokens = 60  # offered in a step that computes nothing of it
        store.scheduled(output({}, offers={"r": [(2, 80, 3 * CHUNK)]}))
        (write,) = store.step().writes
        assert (write.first, write.states) == (2, {3 * CHUNK: {1: 80}})


def test_a_hand_off_goes_before_the_store():
    with Requests() as store:
        made = ConnectorScheduler(GROUPS, produces=True, consumes=True, store=store)
        made.serve(["ipc:///a"])
        told = {"do_remote_prefill": True, "remote_request_id": "room"}
        told |= {"remote_addresses": ["ipc:///b"], "remote_num_tokens": 59}
        asked = request("d", PROMPT, kv_transfer_params=told)
        made.arrived(asked)
        assert made.matched(asked, 0) == (59, True)
        blocks = SimpleNamespace(get_block_ids=lambda: ([1], [2], [3]))
        made.allocated(asked, blocks, 59)
        step = made.step()
        assert len(step.receives) == 1 and not step.store.reads
        made.allocated(asked, blocks, 0)
        asked.num_computed_tokens = 59  # what was handed over is stored too
        made.scheduled(output({"d": 1}))
        (write,) = made.step().store.writes
        assert (write.first, len(write.keys)) == (0, 3)
        made.finished(asked, ([1], [2], [3]))


def test_what_cannot_be_handed_over_beside_a_store_is_computed(caplog):
    with Requests() as store:
        made = ConnectorScheduler(
            GROUPS, produces=True, consumes=True, store=store, refusal="prefix caching is on."
        )
        told = {"do_remote_prefill": True, "remote_request_id": "room"}
        asked = request("d", PROMPT, kv_transfer_params=told | {"remote_addresses": ["ipc:///b"]})
        made.arrived(asked)
        assert "prefix caching is on." in caplog.text
        until = time.monotonic() + 20
        while (answer := made.matched(asked, 0))[0] is None:
            assert time.monotonic() < until
        assert answer == (0, False)


def configuration(**said):
    """The part of a VllmConfig that is read."""
    transfer = {"kv_role": "kv_both", "kv_load_failure_policy": "fail", **said}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer),
        num_prefill_lookahead_tokens=0,
        model_config=SimpleNamespace(multimodal_config=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
    )


def groups(*sizes):
    return [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]


def test_an_engine_with_a_store_computes_what_does_not_come(caplog):
    config, cache = configuration(), SimpleNamespace(kv_cache_groups=groups(16, 48))
    assert stored_requests(Settings(), config, cache, []) is None
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert stored_requests(Settings(store=fresh()), config, cache, []) is not None
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert "kv_load_failure_policy is now recompute" in caplog.text


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_with_a_store_has_both_roles(role):
    cache = SimpleNamespace(kv_cache_groups=groups(16))
    with pytest.raises(ValueError, match=f"kv_role {role} with a store.*Set kv_both"):
        stored_requests(Settings(store="memory://a"), configuration(kv_role=role), cache, [])


def test_windows_that_are_computed_again_are_refused():
    specs, cache = (
        [SimpleNamespace(bounded_replay=True)],
        SimpleNamespace(kv_cache_groups=groups(1)),
    )
    with pytest.raises(ValueError, match="Leave the store out"):
        stored_requests(Settings(store="memory://a"), configuration(), cache, specs)


def test_hits_are_whole_blocks_of_every_group_where_vllm_shares_blocks():
    config = configuration()
    assert cached_unit(config, groups(16, 48)) == 96
    config.cache_config.enable_prefix_caching = False
    assert cached_unit(config, groups(16, 48)) == 1


def mamba(mode, size):
    return SimpleNamespace(mamba_cache_mode=mode, block_size=size)


@pytest.mark.parametrize(
    ("specs", "boundary", "words"),
    [
        ([mamba("align", 8)], 48, ""),
        (
            [mamba("align", 8), mamba("align", 12)],
            0,
            "blocks of 12, 8 tokens do not divide it. Use",
        ),
        ([mamba("none", 8)], 0, "Use --enable-prefix-caching"),
        ([SimpleNamespace(block_size=8)], 0, ""),
    ],
)
def test_a_step_of_a_prompt_ends_with_its_last_chunk(specs, boundary, words, caplog):
    config, cache = configuration(), SimpleNamespace(kv_cache_groups=groups(8))
    settings = Settings(store=fresh(), chunk_tokens=CHUNK)
    store = stored_requests(settings, config, cache, specs)
    told = [request("a", PROMPT), request("b", PROMPT), request("c", PROMPT, resumable=True)]
    for asked, known in zip(told, (0, 16, 0)):
        asked.shared_prefix_boundary = known
        store.arrived(asked)
        store.matched(asked, 0)
    assert [asked.shared_prefix_boundary for asked in told] == [boundary, 16, 0]
    assert words in caplog.text
    assert bool(words) == ("state is stored only where" in caplog.text)
