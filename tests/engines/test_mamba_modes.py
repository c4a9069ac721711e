"""Recurrent states of vLLM in every `mamba_cache_mode`, with and without speculation: blocks as its
own manager gives them to a request, states where its own kernels' metadata looks for them.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.config.vllm import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from disagg.connectors.blocks import block_table
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform
from disagg.plan import plan
from tests import oracle
from tests.disagg.connectors.vllm import engines

BLOCKS, BLOCK, MOST, BF16 = 24, 16, 256, torch.bfloat16
NAME = "model.layers.0.linear_attn"


def mamba_spec(shapes, dtypes, mode="none", spec=0, kind="GDN_ATTN"):
    return MambaSpec(
        block_size=MOST if mode == "none" else BLOCK,
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        mamba_type=MambaAttentionBackendEnum[kind],
        mamba_cache_mode=mode,
        num_speculative_blocks=spec,
    )


class Side:
    """An engine of one delta net, whose drafter proposes `drafts` tokens."""

    def __init__(self, mode, drafts, seed):
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 2, 4, 8, 8, 4, drafts)
        self.spec, self.drafts = mamba_spec(shapes, (BF16, torch.float32), mode, drafts), drafts
        self.raw = torch.from_numpy(
            np.random.default_rng(seed).integers(
                0, 256, (BLOCKS, self.spec.page_size_bytes), dtype=np.uint8
            )
        )
        groups = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([NAME], self.spec)])
        config = engines.config({NAME: SimpleNamespace()})
        config.num_speculative_tokens = drafts
        views = {NAME: self.raw.view(torch.int8)[:, None, None]}
        self.seen = engine_layout(config, groups, views, Platform())
        self.manager = KVCacheManager(
            groups, MOST, self.spec.block_size, self.spec.block_size, enable_caching=False
        )
        other = request("other", 40)  # so that ids are not the first ones
        self.manager.allocate_slots(other, 40)

    def state_block(self, name, tokens):
        """Where the state after so many tokens is, as the metadata of vLLM's kernels has it."""
        (ids,) = self.manager.get_block_ids(name)
        table = torch.zeros(1, MOST // BLOCK + 4, dtype=torch.int32)
        table[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        lengths, mode = torch.tensor([tokens], dtype=torch.int32), self.spec.mamba_cache_mode
        return int(mamba_get_block_table_tensor(table, lengths, self.spec, mode)[0, 0])

    def state(self, block):
        """The bytes of a state: the conv's last inputs, and not what speculation adds to them."""
        (taps, channels), _ = self.spec.shapes
        conv = self.raw[block, : 2 * taps * channels]
        return conv[: 2 * 3 * channels], self.raw[block, conv.numel() :]

    def table(self, name, tokens):
        return block_table(self.seen.groups, self.manager.get_block_ids(name), tokens)


def request(name, tokens):
    return Request(name, [*range(1, tokens + 1)], SamplingParams(max_tokens=4), None)


MODES = [(mode, drafts) for mode in ("none", "align", "all") for drafts in (0, 2)]


@pytest.mark.parametrize("tokens", [5, 33, 64, 75])
@pytest.mark.parametrize("decode", MODES, ids=str)
@pytest.mark.parametrize("prefill", MODES, ids=str)
def test_the_state_of_the_last_token_moves_between_every_two_modes(prefill, decode, tokens):
    source, dest = Side(*prefill, 1), Side(*decode, 2)
    ask = request("p", tokens)
    for end in sorted({*range(32, tokens, 32), tokens}):  # in chunks that end with blocks
        assert source.manager.allocate_slots(ask, end - ask.num_computed_tokens)
        ask.num_computed_tokens = end
    assert dest.manager.allocate_slots(
        request("d", tokens + 1), 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
    )
    live, own = source.state_block("p", tokens), dest.state_block("d", tokens)
    assert live and own
    expected = dest.raw.clone()
    dest_taps = dest.spec.shapes[0][0]
    conv, temporal = source.state(live)
    expected[own, : conv.numel()] = conv
    expected[own, 2 * dest_taps * dest.spec.shapes[0][1] :] = temporal
    tables = source.table("p", tokens), dest.table("d", tokens)
    oracle.copy(plan([source.seen.layout], dest.seen.layout).bind(0, *tables))
    assert dest.raw.equal(expected)
    assert not torch.equal(conv, Side(*decode, 2).state(own)[0])


def replay(backend=MambaBackendEnum.TRITON):
    """The states of a Mamba-2 layer with ReplaySSM."""
    base = MambaStateShapeCalculator.mamba2_state_shape(1, 128, 1, 8, 16, 32, 4)
    shapes = MambaStateShapeCalculator.append_replayssm_ring(base, 1, 1, 16, backend)
    return shapes, MambaStateDtypeCalculator.append_replayssm_ring((BF16, BF16), BF16)


def test_rings_of_replayssm_are_refused_by_name():
    spec = mamba_spec(*replay(), kind="MAMBA2")
    views = {NAME: torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)}
    groups = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([NAME], spec)])
    with pytest.raises(UnknownFormat) as refused:
        engine_layout(engines.config({NAME: SimpleNamespace()}), groups, views, Platform())
    words = [NAME, "MAMBA2", "5 states", "--use-replayssm"]
    assert all(word in str(refused.value) for word in words), refused.value


def test_vllm_itself_takes_replayssm_with_no_connector():
    """The reason why its states stay refused: nothing could be tried."""
    said = SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=True, mamba_cache_mode="none"),
        model_config=SimpleNamespace(architecture="Mamba2ForCausalLM", supports_replayssm=True),
        mamba_config=SimpleNamespace(backend=MambaBackendEnum.TRITON),
        kv_transfer_config=SimpleNamespace(is_kv_transfer_instance=True),
        num_speculative_tokens=0,
        use_v2_model_runner=False,
    )
    with pytest.raises(ValueError, match="--use-replayssm is incompatible with KV connectors"):
        VllmConfig.validate_mamba_cached_kernel(said)
