"""sglang#23893 between processes: an NPU's prefill stages, and a decode with a draft layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg import DecodeEndpoint, KVPoll
from disagg.engines.base import create_engine
from disagg.plan import IncompatibleLayouts
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.kvpool_npu.pools import npu_nsa
from tests.pools import nsa

TOKENS = 21
CHUNKS = (range(7), range(7, TOKENS))
LAYERS = 5
HELD = {"index_layers": None, "total_kv_layers": LAYERS, "num_pages": 12, "device": "npu-reference"}
NPU = {  # kinds of buffers: 3, and 4 with scales
    "keys": npu_nsa.but(**HELD),
    "keys and scales": npu_nsa.but(index_packing="fp8", **HELD),
}
GPU = {
    "keys": nsa.but(index_packing="bf16", **{**HELD, "device": "cpu"}),
    "keys and scales": nsa.but(**{**HELD, "device": "cpu"}),
}
STAGES = (range(3), range(3, LAYERS))


def hand_off(farm, engine, ranks, dest, layout=None, **options):
    """Reads from `ranks` into `dest` and compares every byte of its memory; `layout` is the
    endpoint's, if it differs.
    """
    with farm.case(engine, ranks, TOKENS) as (addresses, prefill):
        oracle.blank(dest)
        layout = layout or dest.layout
        with DecodeEndpoint(layout, create_engine(engine), **options) as decode:
            decode.connect(addresses, timeout=60)
            decode.receive("r", address := oracle.place(dest, TOKENS))
            for chunk in CHUNKS:
                prefill("send", "r", chunk)
            assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
            oracle.assert_holds(dest, address)
        assert prefill("wait", "r") == [(KVPoll.Success, None)] * len(ranks)


def stages(build):
    return [(build.but(layers=layers),) for layers in STAGES]


engines = pytest.mark.parametrize("engine", ENGINES)
kinds = pytest.mark.parametrize("kind", NPU)


@engines
@kinds
def test_stages_land_layer_by_layer_and_the_draft_layer_behind_them_is_untouched(
    farm, kind, engine
):
    """sglang#23893: groups were cut at decode's number of layers, draft included."""
    pool = NPU[kind](layers=range(LAYERS + 1), total_kv_layers=LAYERS + 1)
    stack = pool.stacked("latent")
    assert len(stack) == LAYERS + 1 and stack.is_contiguous()
    regions = tuple(region for region in pool.layout.regions if region.layer < LAYERS)
    named = {region.buffer for region in regions}
    buffers = tuple(buffer for buffer in pool.layout.buffers if buffer.name in named)
    layout = replace(pool.layout, regions=regions, buffers=buffers, total_kv_layers=LAYERS)
    whole = oracle.state(pool)
    views = {key: view for key, view in whole.views.items() if key[1] < LAYERS}
    # all memory is compared: the draft layer's must be blank
    hand_off(farm, engine, stages(NPU[kind]), oracle.State(layout, whole.memory, views))


@engines
@kinds
def test_a_draft_beside_the_last_stage_lands_in_decodes(farm, kind, engine):
    """sglang#23893, sglang#33497."""
    draft = NPU[kind].but(owner="draft", layers=[LAYERS], total_kv_layers=1)
    first, last = stages(NPU[kind])
    dest = oracle.merged(NPU[kind](layers=range(LAYERS)), draft())
    hand_off(farm, engine, [first, (*last, draft)], dest)


@kinds
def test_a_draft_that_prefill_lacks_stays_unchanged_if_allowed(farm, kind):
    draft = NPU[kind].but(owner="draft", layers=[LAYERS], total_kv_layers=1)
    target = NPU[kind](layers=range(LAYERS))
    both = oracle.merged(target, draft())
    views = {key: view for key, view in both.views.items() if key[0] == "target"}
    dest = oracle.State(target.layout, both.memory, views)
    ranks = stages(NPU[kind])
    with pytest.raises(IncompatibleLayouts, match=r"allow_missing=\{'draft'\}"):
        hand_off(farm, "local", ranks, dest, both.layout)
    hand_off(farm, "local", ranks, dest, both.layout, allow_missing={"draft"})


@engines
@kinds
@pytest.mark.parametrize("way", ["GPU to NPU", "NPU to GPU"])
def test_stages_of_the_other_kind_of_device_land_too(farm, kind, way, engine):
    there, here = (GPU, NPU) if way == "GPU to NPU" else (NPU, GPU)
    hand_off(farm, engine, stages(there[kind]), oracle.state(here[kind](layers=range(LAYERS))))
