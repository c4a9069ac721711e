"""NPUMHAPool and NPUMLAPool: every descriptor against expectations by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpool import Shard
from kvpool.describe import describe
from kvpool_npu import NPUMLAPool
from tests.kvpool_npu.pools import NPU, npu_hybrid, npu_mha, npu_mla, npu_nsa
from tests.pools import hybrid_nsa

ALL, INDEXED = [0, 1, 2, 3], [1, 3]
# by hand, of each kind of buffer, in order: role, layers, dtype, axes of an entry
ROWS = [("latent", ALL, "bfloat16", [16]), ("rope", ALL, "bfloat16", [8])]
EXPECTED = {
    "mha": [("k", ALL, "bfloat16", [4, 8]), ("v", ALL, "bfloat16", [4, 8])],
    "mha, v differs": [("k", ALL, "bfloat16", [4, 8]), ("v", ALL, "bfloat16", [4, 16])],
    "mla": ROWS,
    "nsa": [*ROWS, ("index_key", INDEXED, "bfloat16", [16])],
    "nsa fp8": [
        *ROWS,
        ("index_key", INDEXED, "float8_e4m3fn", [16]),
        ("index_key.scale", INDEXED, "float32", [1]),
    ],
    "nsa int8": [
        *ROWS,
        ("index_key", INDEXED, "int8", [16]),
        ("index_key.scale", INDEXED, "float16", [1]),
    ],
}
STEPS = {"cpu": 64, "meta": 64, "npu-reference": 2 << 20}


@pytest.mark.parametrize("device", STEPS)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_buffer_is_listed_kind_by_kind_where_a_stack_has_it(name, device):
    pool = NPU[name](device=device)
    kinds, step = EXPECTED[name], STEPS[device]
    first = 0 if device == "meta" else pool._slab.data_ptr()
    rows, pointer = [], first
    for role, layers, dtype, axes in kinds:
        stack = pool.stacked(role)
        assert stack.is_contiguous() and stack.dtype == getattr(torch, dtype)
        assert stack.shape == (len(layers), 9, 4, *axes)
        page = stack[0, 0].nbytes
        for layer in layers:
            rows.append((pointer, 9 * page, page, layer))
            pointer += 9 * page
        pointer = -(-pointer // step) * step
    assert first % step == 0
    assert list(zip(*pool.get_contiguous_buf_infos())) == rows
    assert pool.nbytes == pointer - first
    assert pool.kv_buf_group_sizes == [len(layers) for _, layers, *_ in kinds]
    assert pool.get_state_buf_infos() == []


@pytest.mark.parametrize("name", NPU)
def test_a_stack_described_back_is_what_the_layout_says(name):
    pool = NPU[name](device="npu-reference")
    for role in {region.role for region in pool.layout.regions}:
        regions = [region for region in pool.layout.regions if region.role == role]
        seen = describe(
            pool.stacked(role),
            ("layer", "item", *(axis.name for axis in regions[0].axes), "cell"),
            role=role,
            layer=[region.layer for region in regions],
            space=pool.layout.space_of(regions[0]).name,
            cell="cell",
            shards={axis.name: (axis.start, axis.total) for axis in regions[0].axes},
        )
        buffers = {buffer.name: buffer for buffer in seen.buffers}
        for described, region in zip(seen.regions, regions, strict=True):
            ours, theirs = pool.layout.buffer_of(region), buffers[described.buffer]
            assert theirs.base + described.offset == ours.base + region.offset
            assert theirs.item_stride == ours.item_stride
            assert replace(described, buffer="b", offset=0) == replace(region, buffer="b", offset=0)


def test_deepseek_v32_is_four_slabs_of_an_npu_in_61_layers():
    pool = NPUMLAPool(
        layers=range(61),
        page_size=128,
        num_pages=3,
        packing="bf16",
        index_head_dim=128,
        index_packing="fp8",
        device="npu-reference",
    )
    assert pool.bytes_per_token == 61 * ((512 + 64) * 2 + 128 + 4)
    assert pool.kv_buf_groups == 4
    slabs = pool.layout.slabs()
    assert len(slabs) == 4 < pool.device.registration_limit
    assert all(slab.base % (2 << 20) == 0 for slab in slabs)
    assert pool.stacked("latent").shape == (61, 3, 128, 512)


def test_a_pipeline_stage_and_a_shard_hold_their_part():
    stage = npu_nsa(layers=[2, 3], total_kv_layers=61)
    assert stage.get_contiguous_buf_infos().layer_ids == [2, 3, 2, 3, 3]
    assert (stage.total_kv_layers, stage.start_layer, stage.end_layer) == (61, 2, 4)
    assert stage.kv_buf_group_sizes == [2, 2, 1]
    part = npu_mha(shard=Shard(1, 2))
    assert part.stacked("k").shape == (4, 9, 4, 2, 8)
    head = part.layout.region_by_key["target", 0, "k"].axis("head")
    assert (head.start, head.size, head.total) == (2, 2, 4)
    # a stage without an indexer has no kind of buffer for it
    assert npu_nsa(layers=[0, 2]).kv_buf_groups == 2


def test_layers_of_a_stack_leave_no_gap_and_kinds_begin_aligned():
    pool = hybrid_nsa(placement="stack", device="npu-reference")
    for one, other in zip(pool.layout.buffers, pool.layout.buffers[1:]):
        kind, following = (buffer.name.rsplit(".", 1)[0] for buffer in (one, other))
        assert other.base == one.end if kind == following else other.base % (2 << 20) == 0


@pytest.mark.parametrize("placement", ["layer", "page"])
def test_a_pool_that_is_no_stack_has_no_tensor_over_layers(placement):
    with pytest.raises(ValueError, match=f"target k: 4 layers, placement '{placement}'.*'stack'"):
        npu_mha(placement=placement).stacked("k")
    with pytest.raises(ValueError, match="target index_key: 0 layers"):
        npu_mla().stacked("index_key")


@pytest.mark.parametrize(
    ("build", "wrong", "says"),
    [
        (npu_mla, {"packing": "fp8"}, "NPUMLA takes any float dtype, got 'fp8'"),
        (npu_nsa, {"index_packing": "mxfp8"}, "NPUIndexKey takes fp8, any float dtype"),
        (npu_nsa, {"index_packing": "int4"}, "dtype 'int4' is not known"),
        (npu_mha, {"num_kv_heads": 0}, "axis head size"),
        (npu_nsa, {"index_head_dim": 0}, "cell index_key count: 1 or more, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_a_sentence(build, wrong, says):
    with pytest.raises(ValueError, match=says):
        build(**wrong)


# typed reads and writes


@pytest.mark.parametrize("packing", ["bf16", "f32", "e4m3"])
def test_k_and_v_or_latent_and_rope_come_back(packing):
    locations = torch.tensor([7, 33, 4])
    for build in (npu_mha.but(v_head_dim=16), npu_mla):
        pool = build(device="npu-reference", packing=packing)
        shapes = [pool.view(role, 2).shape[2:] for role in pool.kinds[0][0].inputs]
        written = [torch.randn(3, *shape).to(getattr(torch, pool.dtype)) for shape in shapes]
        pool.set_kv_buffer(2, locations, *written)
        for read, values in zip(pool.get_kv_buffer(2, locations), written):
            assert torch.equal(read.float(), values.float())


@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
def test_int8_index_keys_are_rounded_to_a_scale_a_token(device):
    pool = npu_nsa(device=device, index_packing="int8")
    keys = torch.zeros(2, 16, dtype=torch.bfloat16)
    keys[0, :4] = torch.tensor([127.0, -63.5, 1.0, 0.4])
    pool.set_index_key(1, [4, 5], keys)
    held = pool.gather("index_key", 1, [4, 5])
    assert held[0, :4].tolist() == [127, -64, 1, 0] and not held[1].any()  # ties to even
    assert pool.gather("index_key.scale", 1, [4, 5]).tolist() == [[1.0], [0.0]]
    assert pool.get_index_key(1, [4]).tolist()[0][:4] == [127.0, -64.0, 1.0, 0.0]


def test_int8_index_keys_are_taken_with_their_scales_and_refused_without():
    pool = npu_nsa(index_packing="int8")
    keys = torch.arange(16, dtype=torch.int8)[None]
    scale = torch.tensor([[0.5]], dtype=torch.float16)
    pool.write(1, [4], {"index_key": keys, "index_key.scale": scale})
    assert pool.get_index_key(1, [4]).tolist() == [[n / 2 for n in range(16)]]
    with pytest.raises(ValueError, match=r"torch.int8 without index_key.scale"):
        pool.set_index_key(1, [4], keys)
    with pytest.raises(ValueError, match=r"index_key: values \(1, 8\)"):
        pool.set_index_key(1, [4], torch.zeros(1, 8, dtype=torch.bfloat16))
    with pytest.raises(KeyError, match="layer 0: no IndexKey"):
        pool.set_index_key(0, [4], keys)


@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
def test_conv_states_are_stored_channels_last_and_passed_channels_first(device):
    pool = npu_hybrid(device=device)
    conv = torch.randn(1, 2 * 3 + 2 * 3 + 4 * 5, 3).to(torch.bfloat16)
    temporal = torch.randn(1, 4, 3, 5)
    pool.set_linear_state(1, [2], conv, temporal)
    buffer = pool.layout.buffer_of(pool.layout.region_by_key["target", 1, "conv.q"])
    held = pool.item_bytes_view(buffer)[2].view(torch.bfloat16).view(3, 32)
    assert torch.equal(held, conv[0].T)
    again = pool.get_linear_state(1, [2])
    assert torch.equal(again[0], conv) and torch.equal(again[1], temporal)


def test_pools_are_drafts_too():
    draft = npu_nsa(owner="draft", layers=[4], index_layers=None, own_spaces=True)
    assert {region.key for region in draft.layout.regions} == {
        ("draft", 4, role) for role in ("latent", "rope", "index_key")
    }
    assert draft.stacked("latent").shape[0] == 1
