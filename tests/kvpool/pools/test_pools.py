"""MHAPool and MLAPool: what they say of their memory, what they write into it, what they cost."""

from __future__ import annotations

import gc
import os
import resource
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from kvpool import BufferSpec, DeviceUnavailable, KVPool, LayoutError, MLAPool, Shard
from kvpool.item import Cell, Repeat, Seq, item_regions
from kvpool.layout import Interleave, Space
from kvpool.layout.dtypes import dtype_name
from tests import pools
from tests.oracle import blank

MARK = 0xA5  # no written value below has this byte by design, and zeroed memory has not either
PAGES, PAGE, HEADS, DIM, V_DIM, LATENT, ROPE = 9, 4, 4, 8, 16, 16, 8  # of tests.pools
LAYERS = (0, 2, 3)
PLACEMENTS = ("layer", "page", "block")
mha, mla = (build.but(layers=LAYERS) for build in (pools.mha, pools.mla))


# what a pool says


def mha_templates(order, dtype):
    for role, dim in (("k", DIM), ("v", V_DIM)):
        cell = Cell(role, dim, dtype)
        if order == "nhd":
            yield Repeat("entry", PAGE, Repeat("head", HEADS, cell))
        else:
            yield Repeat("head", HEADS, Repeat("entry", PAGE, cell))


def mla_templates(order, dtype):
    row = Seq(Cell("latent", LATENT, dtype), Cell("rope", ROPE, dtype))
    yield Repeat("entry", PAGE, row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("build", "templates", "order"),
    [(mha, mha_templates, "nhd"), (mha, mha_templates, "hnd"), (mla, mla_templates, None)],
)
def test_a_pool_holds_the_regions_of_its_templates(dtype, build, templates, order):
    pool = build(packing=dtype, **({} if order is None else {"order": order}))
    expected = [
        region
        for template in templates(order, dtype)
        for layer in LAYERS
        for region in item_regions(template, owner="target", layer=layer, buffer="?")
    ]
    assert [replace(region, buffer="?") for region in pool.layout.regions] == expected
    count = len([*templates(order, dtype)]) * len(LAYERS)
    assert len({region.buffer for region in pool.layout.regions}) == count


def test_check_integrity_sees_a_view_that_lies_elsewhere():
    pool = mha()
    pool._views["k", 0] = pool.view("k", 2)
    with pytest.raises(LayoutError, match="target layer 0 k"):
        pool.check_integrity()


@pytest.mark.parametrize("build", [mha, mla])
def test_placement_by_page_puts_all_layers_of_a_page_side_by_side(build):
    buffers = build(placement="page").layout.buffers
    page = sum(buffer.item_bytes for buffer in buffers)
    assert {buffer.item_stride for buffer in buffers} == {page}
    assert max(b.base + b.item_bytes for b in buffers) - min(b.base for b in buffers) == page


@pytest.mark.parametrize(("build", "placement"), list(product((mha, mla), PLACEMENTS)))
def test_a_pool_is_one_slab_that_holds_all_it_allocated(build, placement):
    pool = build(placement=placement)
    (slab,) = pool.layout.slabs()
    assert slab.base % 64 == 0
    assert pool.nbytes - 64 < slab.nbytes <= pool.nbytes
    assert sum(b.items * b.item_bytes for b in pool.layout.buffers) <= slab.nbytes


def test_owner_layers_and_model_are_in_the_layout():
    pool = mha(owner="draft", layers=[61], total_kv_layers=1, model="deepseek")
    assert {region.key for region in pool.layout.regions} == {
        ("draft", 61, "k"),
        ("draft", 61, "v"),
    }
    assert (pool.layout.total_kv_layers, pool.layout.model) == (1, "deepseek")


@pytest.mark.parametrize(
    ("owner", "layers"),
    [
        ("target", range(20, 40)),
        ("target", [0, 2]),
        ("target", [1]),
        ("draft", [61]),
        ("draft", [0]),
    ],
)
def test_the_layers_of_the_model_are_not_guessed_from_a_part_of_them(owner, layers):
    says = rf"{owner} total_kv_layers: not given, and layers .* Give total_kv_layers\."
    with pytest.raises(ValueError, match=says):
        mla(owner=owner, layers=layers, total_kv_layers=None)
    assert mla(layers=range(40), total_kv_layers=None).total_kv_layers == 40


# shards


@pytest.mark.parametrize(
    ("size", "heads", "expected"),
    [
        (1, 8, [(0, 8)]),
        (4, 8, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (4, 4, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (4, 2, [(0, 1), (0, 1), (1, 1), (1, 1)]),  # replicas
        (8, 1, [(0, 1)] * 8),
    ],
)
def test_a_shard_of_heads_is_a_part_or_a_replica(size, heads, expected):
    assert [Shard(rank, size).of(heads) for rank in range(size)] == expected


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(ValueError, match=rf"shard: rank {rank} of {size}"):
        Shard(rank, size)


# reads and writes that are refused; the kit has those that are not


def zeros(*shape) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_values_of_a_graph_are_written_without_it():
    pool = mla(packing="float32")
    pool.scatter(0, [5], {"latent": torch.ones(1, LATENT, requires_grad=True)})
    assert pool.gather("latent", 0, [5]).sum() == LATENT
    assert not pool.view("latent", 0).requires_grad


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("viewed", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_inference_mode_changes_nothing(built, viewed, written):
    with torch.inference_mode(built):
        pool = mla(packing="float32")
    with torch.inference_mode(viewed):
        pool.view("latent", 0)
    with torch.inference_mode(written):
        pool.scatter(0, [5], {"latent": torch.ones(1, LATENT)})
    pool.scatter(0, [6], {"latent": torch.ones(1, LATENT)})
    assert pool.gather("latent", 0, [5, 6]).sum() == 2 * LATENT


@pytest.mark.parametrize(
    ("build", "values"),
    [
        (mha, (zeros(1, HEADS, DIM), zeros(1, HEADS, V_DIM))),
        (mla, (zeros(1, LATENT), zeros(1, ROPE))),
    ],
)
@pytest.mark.parametrize("outside", [-1, PAGES * PAGE, 1 << 40])
def test_a_location_outside_is_refused_and_nothing_is_written(build, values, outside):
    pool = build()
    blank(pool, MARK)
    says = rf"target layer 0 (k|latent): location {outside} of {PAGES * PAGE}"
    with pytest.raises(IndexError, match=says):
        pool.set_kv_buffer(0, [outside], *values)
    with pytest.raises(IndexError, match=says):
        pool.get_kv_buffer(0, [outside])
    assert (pools.memory_of(pool) == MARK).all()


@pytest.mark.parametrize("locations", [[1.5], [True], [[1, 2]]])
def test_locations_that_are_no_flat_integers_are_refused(locations):
    with pytest.raises((TypeError, ValueError, IndexError)):
        mla().get_kv_buffer(0, locations)


@pytest.mark.parametrize("shape", [(1, HEADS, DIM), (HEADS, DIM), (5, 1, DIM), (6, HEADS, DIM)])
def test_values_of_another_shape_are_refused(shape):
    """No broadcast: one token's K over five tokens is a bug of the caller."""
    with pytest.raises(ValueError, match=r"target layer 0 k: values .* the pool takes \(5, 4, 8\)"):
        mha().scatter(0, [4, 19, 6, 0, 13], {"k": zeros(*shape)})


def test_a_layer_or_role_that_is_not_held_is_refused():
    with pytest.raises(KeyError, match=r"target layer 1 k: not in this pool"):
        mha().view("k", 1)
    with pytest.raises(KeyError, match=r"target layer 2 latent: .*\['k', 'v'\]"):
        mha().view("latent", 2)


@pytest.mark.parametrize(
    ("held", "scale"), [("e5m2", "f32"), ("e4m3", "bf16"), ("uint8", "f16"), ("int8", "f64")]
)
def test_floats_for_a_format_that_is_not_known_are_refused(held, scale):
    class Keys(KVPool):
        def declare(self):
            row = Seq(Cell("key", 16, held), Cell("key.scale", 2, scale))
            yield BufferSpec("key", self.layers, "kv", Repeat("entry", self.page_size, row))

    pool = Keys(layers=[0], num_pages=3, page_size=4, dtype="bf16")
    before = pools.memory_of(pool)
    kinds = (getattr(torch, dtype_name(each)) for each in (held, scale))
    says = r"target layer 0 key: cannot quantise to {} with scales of {}.*Give values and".format(
        *kinds
    )
    with pytest.raises(ValueError, match=says):
        pool.write(0, [5], {"key": torch.ones(1, 16)})
    assert (pools.memory_of(pool) == before).all()


def test_a_read_or_write_of_no_role_is_refused():
    pool = mha()
    for call in (pool.read_roles, lambda *_: pool.write(0, [1], {})):
        with pytest.raises(ValueError, match=r"target layer 0: give one role or more"):
            call((), 0, [1])


def test_a_pool_without_memory_refuses_reads_and_writes():
    pool = mla(device="meta")
    with pytest.raises(DeviceUnavailable, match="no memory to write, read or copy"):
        pool.set_kv_buffer(0, [5], zeros(1, LATENT), zeros(1, ROPE))
    with pytest.raises(DeviceUnavailable, match="no memory to write, read or copy"):
        pool.get_kv_buffer(0, [5])


# sizes


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_pool_of_a_tebibyte_on_meta_takes_no_memory():
    before, mapped = resident(), mappings()
    pages = (1 << 40) // (61 * 64 * 1152) + 1
    pool = MLAPool(layers=range(61), num_pages=pages, page_size=64, dtype="bf16", device="meta")
    pool.check_integrity()
    assert pool.bytes_per_token == 61 * 1152 and pool.nbytes == pages * 64 * 61 * 1152 >= 1 << 40
    assert pool.view("latent", 60).shape == (pages, 64, 512)
    assert resident() - before < 64 << 20
    assert mappings() == mapped


# lifetimes


def mappings() -> int:
    """How many pools' memories are mapped in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvpool")


def handles() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("build", [mha, mla])
def test_memory_is_unmapped_with_the_pool(build):
    before = mappings()
    pool = build()
    pool.check_integrity()
    assert mappings() == before + 1
    del pool
    assert mappings() == before


def test_memory_lives_as_long_as_a_view():
    before = mappings()
    view = mha().view("v", 3)
    assert mappings() == before + 1
    view[4, 3] = 1
    assert view[4, 3].float().sum() == HEADS * V_DIM
    del view
    assert mappings() == before


class SharedOut(MLAPool):
    """A pool whose spaces are interleaved."""

    def spaces(self):
        yield Space("kv", "paged", self.page_size, interleave=Interleave(4, 0, 2))


def test_a_pool_of_some_positions_is_refused():
    said = r"space kv: interleave=.* a pool holds all positions .* with kvpool.describe"
    with pytest.raises(LayoutError, match=said):
        SharedOut(
            layers=[0], kv_lora_rank=8, qk_rope_head_dim=4, num_pages=4, page_size=4, dtype="bf16"
        )


def test_pools_leak_no_file_descriptors():
    before = handles()
    for _ in range(20):
        mha().check_integrity()
    assert handles() == before


def test_a_pool_that_is_refused_leaves_nothing_behind():
    before, opened = mappings(), handles()
    with pytest.raises(LayoutError):
        mla(owner="")
    with pytest.raises(LayoutError):
        mha(model="m", head_dim=0)
    assert (mappings(), handles()) == (before, opened)


# refusals


def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(
        DeviceUnavailable, match=r"device 'abacus:3': .* 'abacus' \(installed: .*cpu.*meta.*\)"
    ):
        mha(device="abacus:3")


@pytest.mark.parametrize(
    ("build", "wrong", "says"),
    [
        (mla, {"layers": []}, r"target layers: distinct numbers from 0, got \[\]"),
        (mla, {"layers": [1, 1]}, r"target layers: distinct numbers from 0, got \[1, 1\]"),
        (mla, {"layers": [-1, 0]}, r"target layers: distinct numbers from 0, got \[-1, 0\]"),
        (mla, {"num_pages": 1}, r"num_pages: 2 or more, got 1. Item 0 of space 'kv' is reserved"),
        (mla, {"num_pages": -5}, r"target num_pages: 2 or more, got -5"),
        (mla, {"page_size": 0}, r"target page_size: 1 or more, got 0"),
        (mla, {"dtype": "bf17"}, r"dtype 'bf17' is not known"),
        (mla, {"dtype": torch.complex64}, r"dtype torch.complex64 is not known"),
        (mla, {"placement": "token"}, r"target placement: one of .*'layer', 'page'.* got 'token'"),
        (mla, {"total_kv_layers": 3}, r"target total_kv_layers: 3, but layer 3 is there"),
        (mla, {"kv_lora_rank": 0}, r"cell latent count: 1 or more, got 0"),
        (mla, {"owner": ""}, r"owner: a name of 1 to 128 characters, got ''"),
        (mha, {"order": "dnh"}, r"order: one of .*'nhd', 'hnd'.* got 'dnh'"),
        (mha, {"num_kv_heads": 0}, r"heads?: .* got 0|axis head size: .* got 0"),
        (mha, {"head_dim": 0}, r"cell k count: 1 or more, got 0"),
        (mha, {"v_head_dim": 0}, r"cell v count: 1 or more, got 0"),
        (mha, {"num_kv_heads": 6, "shard": Shard(0, 4)}, r"6 heads cannot be split over 4 ranks"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_a_sentence(build, wrong, says):
    with pytest.raises(ValueError, match=says):
        build(**wrong)


@pytest.mark.parametrize("wrong", [{"pages": 5}, {"num_heads": 8}])
def test_an_argument_that_does_not_exist_is_refused(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        mla(**wrong)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (2, r"target layers: the numbers of the layers .*, got 2\. Give them, such as range\(2\)"),
        ("2", r"got '2'\. Give them, such as range\(2\) or \[0, 3\]"),
        ([0.5], r"got \[0\.5\]\. Give them"),
        (None, "got None. Give them"),
    ],
)
def test_layers_are_numbers_and_not_how_many(layers, says):
    with pytest.raises(TypeError, match=says):
        MLAPool(layers=layers, kv_lora_rank=4, qk_rope_head_dim=2, page_size=4, num_pages=3)
