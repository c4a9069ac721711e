"""What a store takes for granted of vLLM's pictures, asked of vLLM's own classes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from disagg.connectors.vllm_store.media import HASH
from tests.disagg.connectors.vllm.test_store import CHUNK, ENCODER, Requests, output

init_none_hash(sha256)
LENGTH, START = 60, 2 * CHUNK - 6
"""Of a prompt, and where its picture begins: it spans two chunks."""


def drawn(seed, size=(28, 56)):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def hashes(pictures, uuids=None, algorithm="blake3", **more):
    """vLLM's own, of the pictures of a request."""
    items = MultiModalDataParser().parse_mm_data({"image": pictures})
    named = parse_mm_uuids(None if uuids is None else {"image": uuids})
    inputs = ProcessorInputs([1], items, named, **more)
    return inputs.get_mm_hashes("a model", algorithm)["image"]


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_a_hash_of_vllm_has_its_form_and_a_clients_own_name_has_not(algorithm):
    (one,) = hashes([drawn(1)], algorithm=algorithm)
    assert HASH.fullmatch(one)
    assert [one] == hashes([drawn(1)], algorithm=algorithm) != hashes([drawn(2)])
    assert hashes([drawn(1)], ["a client's"]) == ["a client's"]
    assert not HASH.fullmatch("a client's")


def test_of_a_name_and_options_vllm_makes_what_looks_like_a_hash_of_a_picture():
    """So the form alone says nothing."""
    options = {"hf_processor_mm_kwargs": {"max_pixels": 784}}
    (one,) = hashes([drawn(1)], ["a client's"], **options)
    assert HASH.fullmatch(one)
    assert [one] == hashes([drawn(2)], ["a client's"], **options)


def item(seed, scale=1.0):
    """As vLLM's processors make it."""
    pixels = torch.from_numpy(np.asarray(drawn(seed)).astype(np.float32) * scale)
    values = {"pixel_values": pixels.to(torch.bfloat16), "image_grid_thw": torch.tensor([1, 2, 4])}
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for name, value in values.items()
        }
    )


def request(name, data, mm_hash, lora=None, identifier=None):
    """A request of vLLM's with a picture."""
    feature = MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=identifier or mm_hash,
        mm_position=PlaceholderRange(offset=START, length=20),
        mm_hash=mm_hash,
    )
    return Request(
        name,
        [7] * LENGTH,
        SamplingParams(max_tokens=8),
        None,
        lora_request=lora,
        mm_features=[feature],
        block_hasher=get_request_block_hasher(16, sha256),
    )


def keys(store, asked):
    """Under which the prompt's chunks are written."""
    store.arrived(asked)
    until = time.monotonic() + 20
    while store.matched(asked, 0)[0] is None:
        assert time.monotonic() < until
    store.scheduled(output({asked.request_id: LENGTH}))
    (write,) = store.step().writes
    store.finished(asked)
    return write.keys


def test_keys_say_what_the_encoder_is_given_whatever_vllm_calls_it():
    (name,) = hashes([drawn(1)])
    options = {"hf_processor_mm_kwargs": {"max_pixels": 784}}
    (hidden,) = hashes([drawn(1)], ["a client's"], **options)
    with Requests(encoder=ENCODER) as store:
        one = keys(store, request("a", item(1), name))
        assert keys(store, request("b", item(1), name)) == one
        # an engine whose processors have other options, which vLLM's hash does not say
        scaled = keys(store, request("c", item(1, scale=0.5), name))
        first = keys(store, request("d", item(1), hidden))
        second = keys(store, request("e", item(2), hidden))
        assert one[0] == scaled[0] == first[0] == second[0]
        assert len({*one[1:], *scaled[1:], *first[1:], *second[1:]}) == 8
        assert keys(store, request("f", item(1), "a client's")) == one[:1]


def test_a_picture_of_which_a_request_has_the_size_only_has_no_key():
    """As vLLM takes it where another engine encodes, or hands over the state."""
    (name,) = hashes([drawn(1)])
    size = MultiModalKwargsItem({"image_grid_thw": item(1)["image_grid_thw"]})
    with Requests(encoder=ENCODER) as store:
        assert len(keys(store, request("a", size, name))) == 1


def test_pictures_that_come_from_vllms_front_end_are_the_same():
    data, feature = item(1), request("r", item(1), hashes([drawn(1)])[0]).mm_features[0]
    decoded = MsgpackDecoder(MultiModalFeatureSpec).decode(MsgpackEncoder().encode(feature))
    assert decoded.data is not feature.data
    with Requests(encoder=ENCODER) as store:
        one = keys(store, request("a", data, feature.mm_hash))
        assert keys(store, request("b", decoded.data, feature.mm_hash)) == one


def test_vllm_gives_the_scheduler_the_same_object_again():
    """So it is hashed once."""
    config = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1))
    cache = LruKeyReplicatedReceiverCache(config)
    sent, again = request("a", item(1), "n" * 64), request("b", None, "n" * 64)
    cache.get_and_update_features(sent.mm_features)
    (feature,) = cache.get_and_update_features(again.mm_features)
    assert feature.data is sent.mm_features[0].data


@pytest.mark.parametrize("tower", [False, True])
def test_what_vllm_calls_a_picture_of_an_adapter_is_known(tower, tmp_path):
    lora = LoRARequest("adapter", 1, str(tmp_path))
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    (name,) = hashes([drawn(1)])
    front = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=tower))
    identifier = InputProcessor._get_mm_identifier(front, name, lora)
    assert (identifier == name) != tower
    with Requests(encoder=ENCODER) as store:
        store.arrived(request("first", item(1), name, lora))
        until = time.monotonic() + 20
        while store._adapters.digest(str(tmp_path)) is None:
            assert time.monotonic() < until
        assert len(keys(store, request("a", item(1), name, lora, identifier))) == 3


def test_vllms_own_keys_tell_apart_no_more():
    """What vLLM says of a block's pictures: a name, and where it begins."""
    asked = request("a", item(1), "n" * 64)
    assert generate_block_hash_extra_keys(asked, 0, 16, 0)[0] is None
    assert generate_block_hash_extra_keys(asked, 16, 32, 0)[0] == (("mm", "n" * 64, START - 16),)
