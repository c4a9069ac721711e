"""NPUMHAPool and NPUMLAPool: every descriptor against expectations by hand and raw pointers."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvpool import Shard
from kvpool.describe import describe
from kvpool_npu import NPUMLAPool
from tests.kvpool_npu.pools import NPU, npu_hybrid, npu_mha, npu_mla, npu_nsa
from tests.kvpool_npu.written import same_bytes, write_everything
from tests.pools import CLASSES, hybrid_nsa

ALL, INDEXED = [0, 1, 2, 3], [1, 3]
# by hand: (role, layers, bytes of a page) of each kind of buffer, in order
EXPECTED = {
    "mha": [("k", ALL, 4 * 4 * 8 * 2), ("v", ALL, 4 * 4 * 8 * 2)],
    "mha, v differs": [("k", ALL, 4 * 4 * 8 * 2), ("v", ALL, 4 * 4 * 16 * 2)],
    "mla": [("latent", ALL, 4 * 16 * 2), ("rope", ALL, 4 * 8 * 2)],
    "nsa": [
        ("latent", ALL, 4 * 16 * 2),
        ("rope", ALL, 4 * 8 * 2),
        ("index_key", INDEXED, 4 * 16 * 2),
    ],
    "nsa fp8": [
        ("latent", ALL, 4 * 16 * 2),
        ("rope", ALL, 4 * 8 * 2),
        ("index_key", INDEXED, 4 * 16),
        ("index_key.scale", INDEXED, 4 * 4),
    ],
    "nsa int8": [
        ("latent", ALL, 4 * 16 * 2),
        ("rope", ALL, 4 * 8 * 2),
        ("index_key", INDEXED, 4 * 16),
        ("index_key.scale", INDEXED, 4 * 2),
    ],
}
DTYPES = {
    "nsa": "bfloat16 bfloat16 bfloat16",
    "nsa fp8": "bfloat16 bfloat16 float8_e4m3fn float32",
    "nsa int8": "bfloat16 bfloat16 int8 float16",
}
STEPS = {"cpu": 64, "meta": 64, "npu-reference": 2 << 20}

expected = pytest.mark.parametrize("name", EXPECTED)
devices = pytest.mark.parametrize("device", STEPS)


@devices
@expected
def test_every_buffer_is_listed_kind_by_kind_where_a_stack_has_it(name, device):
    pool = NPU[name](device=device)
    kinds, step = EXPECTED[name], STEPS[device]
    at = 0 if device == "meta" else pool._slab.data_ptr()
    assert at % step == 0
    rows = []
    for _, layers, page in kinds:
        for layer in layers:
            rows.append((at, 9 * page, page, layer))
            at += 9 * page
        at = -(-at // step) * step
    assert list(zip(*pool.get_contiguous_buf_infos())) == rows
    assert pool.nbytes == at - rows[0][0]
    assert pool.kv_buf_group_sizes == [len(layers) for _, layers, _ in kinds]
    assert pool.get_state_buf_infos() == []
    assert (pool.total_kv_layers, pool.start_layer, pool.end_layer) == (4, 0, 4)


@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
@expected
def test_bytes_lie_at_pointer_plus_page_times_item_length(name, device):
    pool = NPU[name](device=device)
    rows = iter(list(zip(*pool.get_contiguous_buf_infos())))
    random = np.random.default_rng(3)
    for role, layers, page in EXPECTED[name]:
        for layer in layers:
            pointer, length, item, _ = next(rows)
            written = random.integers(0, 256, page, dtype=np.uint8)
            view = pool.view(role, layer)
            view[7] = torch.from_numpy(written).view(view.dtype).view(view.shape[1:])
            assert ctypes.string_at(pointer + 7 * item, item) == written.tobytes()
            assert not any(ctypes.string_at(pointer, 7 * item))
            assert not any(ctypes.string_at(pointer + 8 * item, length - 8 * item))


@devices
@expected
def test_one_tensor_a_role_is_stacked_over_layers(name, device):
    pool = NPU[name](device=device)
    for role, layers, page in EXPECTED[name]:
        whole = pool.stacked(role)
        assert whole.is_contiguous() and len(whole) == len(layers)
        assert whole.nbytes == len(layers) * 9 * page
        assert whole.shape[1:3] == (9, 4)
        for part, layer in zip(whole, layers):
            view = pool.view(role, layer)
            assert part.dtype == view.dtype and part.stride() == view.stride()
            assert part.storage_offset() == view.storage_offset()


@pytest.mark.parametrize("device", ["cpu", "npu-reference", "meta"])
@pytest.mark.parametrize("name", NPU)
def test_a_stack_described_back_is_what_the_layout_says(name, device):
    pool = NPU[name](device=device)
    pool.check_integrity()
    for role in {region.role for region in pool.layout.regions}:
        regions = [region for region in pool.layout.regions if region.role == role]
        one = regions[0]
        inner = [axis.name for axis in one.axes]
        shards = {axis.name: (axis.start, axis.total) for axis in one.axes}
        seen = describe(
            pool.stacked(role),
            ("layer", "item", *inner, "cell"),
            role=role,
            layer=[region.layer for region in regions],
            space=pool.layout.space_of(one).name,
            cell="cell",
            shards=shards,
        )
        buffers = {buffer.name: buffer for buffer in seen.buffers}
        for found, region in zip(seen.regions, regions, strict=True):
            home, known = buffers[found.buffer], pool.layout.buffer_of(region)
            assert home.base + found.offset == known.base + region.offset
            assert home.item_stride == known.item_stride
            assert replace(found, buffer="?", offset=0) == replace(region, buffer="?", offset=0)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_and_shapes_are_those_of_released_engines(name):
    pool = NPU[name]()
    for (role, layers, _), dtype in zip(EXPECTED[name], DTYPES[name].split()):
        whole = pool.stacked(role)
        dim = {"latent": 16, "rope": 8, "index_key": 16, "index_key.scale": 1}[role]
        assert whole.shape == (len(layers), 9, 4, dim)
        assert str(whole.dtype) == f"torch.{dtype}"


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


@pytest.mark.parametrize("build", [*CLASSES.values(), *NPU.values()])
def test_placements_hold_the_same_bytes(build):
    stack, layers = build(placement="stack"), build(placement="layer")
    stack.check_integrity()
    same_bytes(stack, layers, write_everything)
    assert [b.name for b in stack.layout.buffers] == [b.name for b in layers.layout.buffers]
    same_bytes(build(placement="page"), build(placement="stack"), write_everything)


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


@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
@pytest.mark.parametrize("packing", ["bf16", "f32", "e4m3"])
def test_k_and_v_or_latent_and_rope_come_back(device, packing):
    where = torch.tensor([7, 33, 4])
    for build in (npu_mha.but(v_head_dim=16), npu_mla):
        pool = build(device=device, packing=packing)
        shapes = [pool.view(role, 2).shape[2:] for role in pool.kinds[0][0].inputs]
        dtype = getattr(torch, pool.dtype)
        first, second = (torch.randn(3, *shape).to(dtype) for shape in shapes)
        pool.set_kv_buffer(2, where, first, second)
        for found, given in zip(pool.get_kv_buffer(2, where), (first, second)):
            assert torch.equal(found.float(), given.float())
        assert pool.stacked(pool.kinds[0][0].inputs[0])[2, 1, 3].float().abs().sum() > 0  # entry 7


@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
@pytest.mark.parametrize(("packing", "error"), [(None, 0), ("fp8", 2**-4), ("int8", 1 / 127)])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_index_keys_come_back(device, packing, error, given):
    pool = npu_nsa(device=device, index_packing=packing)
    if packing is None and given is not torch.bfloat16:
        return
    keys = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(given)
    where = torch.tensor([7, 33, 4])
    pool.set_index_key(3, where, keys)
    found = pool.get_index_key(3, where).float()
    largest = keys.float().abs().amax(-1, keepdim=True)
    assert ((found - keys.float()).abs() <= error * largest + 2**-8 * largest).all()
    assert not pool.view("index_key", 1).view(torch.uint8).any()


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
