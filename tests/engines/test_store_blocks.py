"""What a store takes for granted of vLLM's blocks, asked of vLLM's own manager and scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

CHUNK, WINDOW = 256, 128
init_none_hash(sha256)


def manager(block, second):
    """Of full attention, and of another group."""
    full = FullAttentionSpec(block, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate((full, second))]
    config = KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(config, 4096, block, block)


def windows(block):
    return SlidingWindowSpec(
        block, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=WINDOW
    )


def states(block):
    return MambaSpec(
        block,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
    )


def request(name, ids, block):
    hasher = get_request_block_hasher(block, sha256)
    return Request(name, list(ids), SamplingParams(max_tokens=8), None, block_hasher=hasher)


def seen(tokens):
    """Positions that the token behind so many sees."""
    return range(max(0, tokens - WINDOW + 1), tokens)


@pytest.mark.parametrize("block", [16, 64, 128, 256])
@pytest.mark.parametrize("stored", [256, 512, 1024])
def test_of_a_window_that_was_read_vllm_shares_only_what_was_read(block, stored):
    made, total = manager(block, windows(block)), stored + 44
    asked = request("r", range(total), block)
    blocks, _, _ = made.get_computed_blocks(asked)
    made.allocate_slots(
        asked, 0, 0, blocks, num_external_computed_tokens=stored, delay_cache_blocks=True
    )
    table = made.get_block_ids("r")[1]
    assert all(table[position // block] for position in seen(stored))
    made.cache_blocks(asked, stored)
    for shared in range(1, stored + 1, 8):
        other = request(f"q{shared}", [*range(shared), *[5000] * 60], block)
        found, hit, _ = made.get_computed_blocks(other)
        theirs = [one.block_id for one in found.blocks[1]]
        for position in seen(hit):
            assert theirs[position // block] == table[position // block]
            assert position in seen(stored)


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("step", [100, 300, 1000])
def test_a_step_has_what_windows_see_at_the_chunks_that_it_fills(block, step):
    made = manager(block, windows(block))
    asked = request("r", range(1500), block)
    made.get_computed_blocks(asked)
    freed = False
    while asked.num_computed_tokens < 1500:
        count = min(step, 1500 - asked.num_computed_tokens)
        stop = asked.num_computed_tokens + count
        made.allocate_slots(asked, count)
        table = made.get_block_ids("r")[1]
        freed |= not table[0]
        for end in range(CHUNK, stop + 1, CHUNK):
            if end > asked.num_computed_tokens:
                assert all(table[position // block] for position in seen(end))
        asked.num_computed_tokens = stop
    assert freed


def step_ends(block, total, junction=0, budget=8192):
    """Where vLLM ends the steps of a prompt of a model with recurrent state."""
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        mamba_partial_cache_hit=False,
        hash_block_size=block,
        block_size=block,
        use_eagle_block_drop=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        mamba_shared_prefix_checkpoint=False,
        max_num_scheduled_tokens=budget,
    )
    asked = SimpleNamespace(
        num_computed_tokens=0,
        num_prompt_tokens=total,
        num_tokens=total,
        shared_prefix_boundary=junction,
    )
    while asked.num_computed_tokens < total:
        more = min(budget, total - asked.num_computed_tokens)
        asked.num_computed_tokens += Scheduler._mamba_block_aligned_split(scheduler, asked, more)
        yield asked.num_computed_tokens


@pytest.mark.parametrize("block", [16, 64, 128, 256])
def test_a_boundary_ends_a_step_with_the_last_chunk_of_a_prompt(block):
    assert 768 in step_ends(block, 1000, 768)
    assert (768 in step_ends(block, 1000)) == (block == CHUNK)


@pytest.mark.parametrize("block", [64, 256])
def test_the_state_at_a_steps_end_lies_where_the_block_table_says_and_is_offered(block):
    made = manager(block, states(block))
    asked = request("r", range(1000), block)
    made.get_computed_blocks(asked)
    made.allocate_slots(asked, 768)
    table = made.get_block_ids("r")[1]
    offers = made.take_boundary_state_offloads()["r"]
    assert (1, table[(768 - 1) // block], 768) in offers
    asked.num_computed_tokens = 768
    made.allocate_slots(asked, 232)
    # what the table says of it now is no state of 768 tokens that may be kept
    assert all(tokens > 768 for _, _, tokens in made.take_boundary_state_offloads().get("r", []))


@pytest.mark.parametrize("block", [64, 256])
def test_a_state_that_is_read_lies_in_the_block_of_the_last_token(block):
    made = manager(block, states(block))
    asked = request("r", range(700), block)
    blocks, _, _ = made.get_computed_blocks(asked)
    made.allocate_slots(
        asked, 0, 0, blocks, num_external_computed_tokens=512, delay_cache_blocks=True
    )
    table = made.get_block_ids("r")[1]
    assert [place for place, one in enumerate(table) if one] == [(512 - 1) // block]
