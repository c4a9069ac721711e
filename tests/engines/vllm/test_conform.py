"""`kvpool conform` with real vLLM servers: what it reads, what it calls wrong, what it leaves."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from disagg.testing.judge import judge_run
from tests.engines import conforming
from tests.engines.conforming import left, pair, side

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with conforming.arena(tmp_path_factory.mktemp("conform"), vllm=sys.executable) as arena:
        yield arena


def damaged(connector, block_size=32):
    module = {"kv_connector": connector, "kv_connector_module_path": "tests.engines.vllm.damaging"}
    return side(block_size, args={"kv_transfer_config": module})


def test_a_pair_of_other_blocks_serves_by_bytes(arena):
    shown = arena.observe(pair(side(32), side(64)))
    assert shown.differences == "" and shown.errors == ()
    assert shown.tokens == shown.alone_prefill == shown.alone_decode
    assert [len(tokens) for tokens in shown.tokens] == [16, 16]
    assert shown.versions["vllm: kvpool"]
    assert judge_run(shown).result == "serves"
    assert not left(arena.folder)


def test_a_dropped_layer_is_wrong_by_bytes_and_by_tokens(arena):
    shown = arena.observe(pair(side(32), damaged("DroppedLayer", 64)))
    assert shown.differences.startswith("target 3 k, token 0, head 0, byte ")
    assert "0 on decode; 2 of 8 parts differ" in shown.differences
    assert shown.tokens != shown.alone_decode
    assert judge_run(shown).result == "WRONG"


def test_a_flipped_bit_of_a_recurrent_state_is_wrong_by_bytes(arena):
    """All other parts of a hybrid are equal."""
    shown = arena.observe(pair(side(), damaged("FlippedBit"), model="qwen3_next"))
    assert shown.differences.startswith("target 0 conv.") and "1 of " in shown.differences
    assert judge_run(shown).result == "WRONG"


def test_vllms_own_connector_is_wrong_between_blocks_of_32_and_64(arena):
    shown = arena.observe(pair(side(32), side(64), connector="nixl"))
    assert shown.differences and shown.tokens != shown.alone_decode
    assert judge_run(shown).result == "WRONG"


def test_a_refusal_has_the_connectors_reason(arena):
    shown = arena.observe(pair(side(dtype="float32"), side()))
    assert "float32" in shown.refused and "bfloat16" in shown.refused
    assert judge_run(shown).result == "refuses"


def test_a_setting_that_does_not_exist_is_refused_at_start(arena):
    shown = arena.observe(replace(pair(side(), side()), settings={"speed": 11}))
    assert "does not start" in shown.refused and "speed" in shown.refused
