"""GPU and NPU pools exchange state, byte-exact if roles and dtypes agree, else refused."""

from __future__ import annotations

import pytest
import torch

from disagg.plan import IncompatibleLayouts, plan
from kvpool import Shard
from tests.kvpool_npu.pools import npu_hybrid, npu_hybrid_nsa, npu_mha, npu_mla, npu_nsa
from tests.oracle import assert_holds, blank, fill, move, place
from tests.pools import hybrid, hybrid_mla, mha, mla, nsa

NPU = {"device": "npu-reference", "num_pages": 12}
GPU = {"num_pages": 12}
TOKENS = 29
INT8 = npu_nsa.but(index_packing="int8")
FP8 = npu_nsa.but(index_packing="fp8")
# what a GPU's layout says of keys in bf16, and of one that has every kind of state of a layer
PAIRS = {
    "mha": (mha.but(v_head_dim=8), npu_mha),
    "mha, v differs": (mha, npu_mha.but(v_head_dim=16)),
    "heads before tokens": (mha.but(order="hnd"), npu_mha.but(v_head_dim=16)),
    "scales of k and v": (mha.but(packing="fp8"), npu_mha.but(packing="fp8", v_head_dim=16)),
    "one row and two tensors": (mla, npu_mla),
    "one row, keys, and three tensors": (nsa.but(index_packing="bf16"), npu_nsa),
    "one row, keys before scales, and four tensors": (nsa, FP8),
    "conv of another order": (hybrid, npu_hybrid),
    "conv and keys of another order": (
        hybrid.but(full=npu_hybrid_nsa.arguments["full"], index=npu_hybrid_nsa.arguments["index"]),
        npu_hybrid_nsa,
    ),
    "mla beside linear attention": (
        hybrid_mla,
        hybrid_mla.but(full=npu_hybrid_nsa.arguments["full"], placement="stack"),
    ),
}
ways = pytest.mark.parametrize("way", ["GPU to NPU", "NPU to GPU", "NPU to NPU"])
between = pytest.mark.parametrize("way", ["GPU to NPU", "NPU to GPU"])


def sides(name, way):
    """(prefill, decode)."""
    gpu, npu = PAIRS[name][0].but(**GPU), PAIRS[name][1].but(**NPU)
    return {"GPU to NPU": (gpu, npu), "NPU to GPU": (npu, gpu), "NPU to NPU": (npu, npu)}[way]


def hand_off(sources, dest, tokens=TOKENS):
    """Fills the sources, moves, compares every byte of dest; returns the plan."""
    there = [place(source, tokens, seed) for seed, source in enumerate(sources, 1)]
    for source, address in zip(sources, there):
        fill(source, address)
    blank(dest)
    made = move(sources, dest, there, here := place(dest, tokens))
    assert_holds(dest, here)
    return made


@ways
@pytest.mark.parametrize("name", PAIRS)
def test_gpu_and_npu_pools_exchange_state_both_ways(name, way):
    prefill, decode = sides(name, way)
    made = hand_off([prefill()], decode())
    assert (made.missing, made.unsent) == ((), ())


@between
@pytest.mark.parametrize("name", PAIRS)
def test_pages_of_another_size_and_stages_are_read_into_the_other(name, way):
    prefill, decode = sides(name, way)
    sources = [prefill(layers=part, total_kv_layers=4) for part in (range(3), range(3, 4))]
    hand_off(sources, decode(page_size=6))


@between
@pytest.mark.parametrize("prefill_tp", [1, 2])
@pytest.mark.parametrize("name", PAIRS)
def test_shards_of_heads_are_read_into_others(name, way, prefill_tp):
    prefill, decode = sides(name, way)
    sources = [prefill(shard=Shard(rank, prefill_tp)) for rank in range(prefill_tp)]
    for rank in range(3 - prefill_tp):
        hand_off(sources, decode(shard=Shard(rank, 3 - prefill_tp)))


def test_a_page_of_one_row_is_two_runs_of_each_entry_and_equal_pages_are_one_run():
    gpu, npu = mla(**GPU), npu_mla(**NPU)
    there = place(gpu, 8, None)
    runs = plan([gpu.layout], npu.layout).bind(0, there, place(npu, 8, None))
    assert sorted(set(runs.nbytes.tolist())) == [8 * 2, 16 * 2]
    assert len(runs.nbytes) == 2 * 4 * 8  # latent and rope, of 4 layers, of 8 entries
    same = plan([npu_mla(**NPU).layout], npu.layout)
    runs = same.bind(0, place(npu, 8, None), place(npu, 8, None))
    assert sorted(runs.nbytes.tolist()) == [2 * 4 * 8 * 2] * 4 + [2 * 4 * 16 * 2] * 4


def test_values_that_a_gpu_quantised_are_read_by_an_npu_as_they_were():
    """Typed reads on both sides agree, not only bytes."""
    gpu, npu = nsa(**GPU), FP8(**NPU)
    keys = torch.randn(3, 16).to(torch.bfloat16)
    gpu.set_index_key(1, [4, 5, 6], keys)
    npu.set_index_key(3, [4, 5, 6], keys)
    address = place(gpu, 7, None)
    move([gpu], npu, [address], address)
    assert torch.equal(npu.get_index_key(1, [4, 5, 6]), gpu.get_index_key(1, [4, 5, 6]))
    for batch in plan([npu.layout], gpu.layout).bind_all([address], address):
        assert batch.nbytes.sum()


def refusal(prefill, decode):
    """The planner's reasons, and their subjects."""
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([prefill.layout], decode.layout)
    return str(refused.value), {(r.layer, r.role) for r in refused.value.reasons}


@pytest.mark.parametrize("back", [False, True])
def test_scales_and_keys_of_another_dtype_are_refused_by_name(back):
    pair = [nsa(**GPU), INT8(**NPU)]
    names = [("float8_e4m3fn", "float32"), ("int8", "float16")]
    if back:
        pair, names = pair[::-1], names[::-1]
    said, what = refusal(*pair)
    assert what == {(1, "index_key"), (3, "index_key")}
    there, here = names
    assert f"target layers 1, 3 index_key: {there[0]} on prefill, {here[0]} on decode" in said
    assert f"{there[0]} with 1 {there[1]} a row to {here[0]} with 1 {here[1]} a row" in said


def test_keys_without_scales_and_keys_that_are_not_there_are_refused_by_name():
    said, what = refusal(npu_nsa(**NPU), FP8(**NPU))
    assert what == {(1, "index_key"), (3, "index_key")}
    assert "index_key: bfloat16 on prefill, float8_e4m3fn on decode" in said
    assert "bfloat16 to float8_e4m3fn with 1 float32 a row" in said
    said, what = refusal(mla(**GPU), npu_nsa(**NPU))
    assert what == {(1, "index_key"), (3, "index_key")}
    # an indexer that decode does not have is not sent, and said
    made = plan([npu_nsa(**NPU).layout], npu_mla(**NPU).layout)
    assert {(layer, role) for _, layer, role in made.unsent} == {(1, "index_key"), (3, "index_key")}


def test_a_row_of_656_bytes_is_no_row_of_an_npu():
    gpu = mla(kv_lora_rank=512, qk_rope_head_dim=64, packing="fp8", **GPU)
    npu = npu_mla(kv_lora_rank=512, qk_rope_head_dim=64, **NPU)
    said, what = refusal(gpu, npu)
    assert what == {(layer, "latent") for layer in range(4)}
    assert "target layers 0-3 latent: float8_e4m3fn on prefill, bfloat16 on decode" in said
