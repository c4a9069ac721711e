"""Reported failures with states beside the main cache: windows, slots, rings, index keys, scales
and compressed entries.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import disagg.engines
from disagg import DecodeEndpoint
from disagg.engines.base import create_engine
from disagg.plan import IncompatibleLayouts, IncompleteTransfer, plan
from disagg.protocol.status import KVPoll
from kvpool import MHA, MLA, DSv4Pool, HybridLinearPool, MHAPool, MLAPool, NSAPool, Shard, SWAPool
from kvpool.describe import describe
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.formats import LinearState, gated_delta_net, kda
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import prefill_process
from tests.oracle import State, assert_holds, blank, fill, hand_off, move, place

SIZES = {"num_pages": 12, "num_window_pages": 70, "num_slots": 5}


def swa(layers=range(6), *, page=16, window=24, **more):
    kinds = {"full": MHA(2, 8), "swa": MHA(4, 4), "window_layers": range(0, 99, 2)}
    common = {**SIZES, "layers": layers, "page_size": page, "dtype": "bf16"}
    return SWAPool(**{**common, **kinds, "window": window, **more})


def hybrid(layers=range(15), *, linear=None, **more):
    """Full attention on 7 of 15 layers."""
    linear = linear or gated_delta_net(k_heads=4, v_heads=8, k_dim=3, v_dim=5, kernel=4)
    kinds = {"full": MHA(2, 8), "linear": linear, "linear_layers": range(0, 99, 2)}
    common = {**SIZES, "layers": layers, "page_size": 16, "dtype": "bf16"}
    return HybridLinearPool(**{**common, **kinds, **more})


def dsv4(layers=range(5), **more):
    """DeepSeek-V4's own sizes of pages, windows and rings, and small rows."""
    dims = {"latent_dim": 24, "qk_rope_head_dim": 8, "index_head_dim": 16}
    common = {**SIZES, "layers": layers, "page_size": 256, "packing": "fp8"}
    return DSv4Pool(**{**common, "compress_ratios": (0, 4, 128, 4, 128), **dims, **more})


def check_moved(engine, dest, arguments, stops):
    """Another process with a pool of the same class hands a request over, in chunks to `stops`."""
    into, build = place(dest, stops[-1]), partial(type(dest), **arguments)
    blank(dest)
    with (
        prefill_process(engine=engine, build=build, tokens=stops[-1]) as prefill,
        DecodeEndpoint(dest.layout, create_engine(engine)) as endpoint,
    ):
        endpoint.connect([prefill.address], timeout=60)
        endpoint.receive("r", into)
        for start, stop in zip((0, *stops), stops):
            prefill.ask("r", start, stop)
        assert endpoint.wait("r", 60) is KVPoll.Success, endpoint.failure("r")
    assert_holds(dest, into)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_every_kind_of_state(engine):
    """sglang#24878, #23773: each transport had its own list of states."""
    arguments = {
        "layers": range(4), "compress_ratios": (0, 4, 128, 4), "page_size": 128, "packing": "fp8",
        **SIZES,
    }  # fmt: skip
    dest = DSv4Pool(**{**arguments, "speculation": True})
    check_moved(engine, dest, arguments, (256, 300))


def test_no_engine_names_a_role():
    """sglang#24878, #23773."""
    roles = {r.role for r in (*dsv4().layout.regions, *hybrid().layout.regions)} | {"swa", "nsa"}
    for source in Path(disagg.engines.__file__).parent.rglob("*.py"):
        words = set(source.read_text().replace('"', " ").replace("'", " ").split())
        assert not words & (roles - {"k", "v", "rope"}), source.name


def test_a_role_that_only_decode_has_is_refused():
    """TensorRT-LLM#18921."""
    common = {"layers": range(4), "num_pages": 9, "page_size": 16, "dtype": "bf16"}
    source, dest = MLAPool(**common), NSAPool(**common, index_layers=(1, 3))
    blank(dest)
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout], dest.layout)
    assert {(r.owner, r.layer, r.role) for r in refused.value.reasons} == {
        ("target", layer, role) for layer in (1, 3) for role in ("index_key", "index_key.scale")
    }
    assert "target layers 1, 3 index_key: prefill offers no such region" in str(refused.value)
    assert_holds(dest, place(dest, 40), range(0))


def test_a_role_that_only_prefill_has_is_not_sent_but_listed():
    """sglang#25698."""
    common = {"layers": range(4), "num_pages": 9, "page_size": 16, "dtype": "bf16"}
    dest = MLAPool(**common)
    transfer, sent = hand_off([NSAPool(**common, index_layers=(1, 3))], dest, 40)
    assert sent == [40 * 4 * 1152]
    unsent = [row for row in transfer.explain(40).rows if row.how == "unsent"]
    assert {(row.roles, row.layers) for row in unsent} == {
        (("index_key",), (1, 3)),
        (("index_key.scale",), (1, 3)),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dense_model_waits_for_no_state(engine):
    """sglang#25698."""
    arguments = {
        "layers": range(2), "num_kv_heads": 2, "head_dim": 8, "num_pages": 9, "page_size": 16,
        "dtype": "bf16",
    }  # fmt: skip
    dest = MHAPool(**arguments)
    assert dest.get_state_buf_infos() == []
    check_moved(engine, dest, arguments, (50,))


def windowed(address, *, drop=0):
    """The same request without the first `drop` items of its window list."""
    window = address.spans["swa"]
    kept = Span(window.ids[drop:], window.first_item + drop)
    return RequestAddress(address.num_tokens, {**address.spans, "swa": kept})


@pytest.mark.parametrize(("there", "here"), [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0)])
@pytest.mark.parametrize("tokens", [70, 79, 80, 81])
def test_window_lists_that_begin_elsewhere_are_paired_by_position(there, here, tokens):
    """sglang#18727, #27004: lists of ids were truncated to one length at the wrong end."""
    source, dest = swa(), swa()
    full = place(source, tokens, 1), place(dest, tokens, 2)
    fill(source, full[0])
    blank(dest)
    lists = [full[0].spans["swa"].ids[there:], full[1].spans["swa"].ids[here:]]
    copies = [ids.copy() for ids in lists]
    move([source], dest, [windowed(full[0], drop=there)], windowed(full[1], drop=here))
    assert all(np.array_equal(ids, copy) for ids, copy in zip(lists, copies))
    assert_holds(dest, full[1])
    newest = dest.view("swa.k", 0).view(torch.uint8)[int(full[1].spans["swa"].ids[-1])]
    assert (newest[(tokens - 1) % 16] != 255).all()


def test_a_window_list_that_lacks_a_live_page_is_refused():
    """sglang#18727, #27004."""
    source, dest = swa(), swa()
    addresses = place(source, 80, 1), place(dest, 80, 2)
    fill(source, addresses[0])
    blank(dest)
    with pytest.raises(IncompleteTransfer, match=r"source: space swa needs .* 48 to 79, .* 64 to"):
        move([source], dest, [windowed(addresses[0], drop=4)], addresses[1])
    assert_holds(dest, addresses[1], range(0))


@pytest.mark.parametrize("stages", [(range(3), range(3, 6)), (range(1), range(1, 6))])
@pytest.mark.parametrize("tokens", [1, 23, 24, 25, 90])
def test_stages_of_a_sliding_window_model_do_not_overwrite_each_other(stages, tokens):
    """sglang 0.5.23: all stages started at layer 0."""
    sources = [swa(stage, total_kv_layers=6) for stage in stages]
    transfer, _ = hand_off(sources, swa(), tokens)
    assert transfer.contributors() == [0, 1]


@pytest.mark.parametrize("cut", [1, 7, 8, 14])
def test_stages_of_a_hybrid_with_7_full_layers_of_15(cut):
    """sglang#33457."""
    assert sum(1 for r in hybrid().layout.regions if r.role == "k") == 7
    sources = [hybrid(part, total_kv_layers=15) for part in (range(cut), range(cut, 15))]
    hand_off(sources, hybrid(), 37)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("channels_first", "channels_first"),
        ("taps_first", "taps_first"),
        ("channels_first", "taps_first"),
        ("taps_first", "channels_first"),
    ],
)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 2), (1, 1), (8, 2), (1, 8)])
def test_sections_of_a_convolution_are_sharded_separately(prefill, decode, there, here):
    """sglang#30997, vllm#37635."""

    def rank(number, size, conv_layout):
        linear = gated_delta_net(4, 8, 3, 5, kernel=4, conv_layout=conv_layout)
        return hybrid(range(3), linear=linear, shard=Shard(number, size))

    sources = [rank(number, prefill, there) for number in range(prefill)]
    for number in range(decode):
        hand_off(sources, rank(number, decode, here), 21)


@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_kda_and_its_temporal_state_are_sharded_over_heads(prefill):
    """sglang#30997."""

    def rank(number, size):
        linear = kda(heads=8, dim=4, kernel=4)
        return hybrid(range(3), linear=linear, full=MLA(16, 8), shard=Shard(number, size))

    hand_off([rank(number, prefill) for number in range(prefill)], rank(1, 2), 21)


@pytest.mark.parametrize("packing", ["fp8", "mxfp8"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_scales_of_k_and_v_are_moved_like_any_region(packing, prefill, decode):
    """sglang#35718; also for the full pool in a hybrid, and for a draft."""

    def mha(number, size, owner):
        more = {"layers": range(8, 10), "total_kv_layers": 8} if owner == "draft" else {}
        return MHAPool(
            **{"layers": range(2), **more}, num_kv_heads=4, head_dim=64, owner=owner, num_pages=9,
            page_size=16, packing=packing, shard=Shard(number, size),
        )  # fmt: skip

    def mixed(number, size, _):
        full = MHA(4, 64)
        return hybrid(range(4), full=full, packing=packing, shard=Shard(number, size))

    for build, owner in ((mha, "target"), (mha, "draft"), (mixed, "target")):
        sources = [build(number, prefill, owner) for number in range(prefill)]
        for number in range(decode):
            dest = build(number, decode, owner)
            assert any(region.role == "k.scale" for region in dest.layout.regions)
            hand_off(sources, dest, 37)


def test_index_keys_on_21_of_78_layers_over_stages():
    """LMCache#5002, TensorRT-LLM#16558."""
    indexed = (*range(0, 77, 4), 77)

    def stage(layers):
        return NSAPool(
            layers=layers, total_kv_layers=78, index_layers=indexed, kv_lora_rank=8,
            qk_rope_head_dim=4, index_head_dim=8, num_pages=5, page_size=16, dtype="bf16",
        )  # fmt: skip

    dest = stage(range(78))
    assert sum(len(infos.layer_ids) for infos in dest.get_state_buf_infos()) == 21
    sources = [stage(layers) for layers in (range(20), range(20, 39), range(39, 77), range(77, 78))]
    hand_off(sources, dest, 37)


@pytest.mark.parametrize("tokens", range(32, 48))
def test_a_ring_of_8_lands_by_position_in_a_ring_of_16(tokens):
    """sglang#24878: only the first half was written."""
    source, dest = dsv4(), dsv4(speculation=True)
    for one, other in ((source, dest), (dest, source)):
        hand_off([one], other, tokens)
    ring = dest.view("c4.state", 1).view(torch.uint8)
    hand_off([source], dest, tokens)
    (slot,) = place(dest, tokens).spans["ring"].ids
    filled = [step for step in range(16) if (ring[int(slot), step] != 255).all()]
    alive = range(tokens // 4 * 4 - 4, tokens)
    assert filled == sorted(position % 16 for position in alive)


def padding(pool, tokens):
    """Padding at the ends of the request's items."""
    items = {"swa": -(-tokens // pool.window_page_size), "c4": -(-tokens // pool.page_size)}
    items["c128"] = items["c4"]
    total = 0
    for buffer in pool.layout.buffers:
        if buffer.space in items:
            regions = [r for r in pool.layout.regions if r.buffer == buffer.name]
            total += items[buffer.space] * (buffer.item_bytes - sum(r.nbytes for r in regions))
    return total


def dead(pool, tokens):
    """Bytes of entries that follow the request in its last pages."""
    total = 0
    for region in pool.layout.regions:
        space = pool.layout.space_of(region)
        size, closed = space.entries_per_item, tokens // space.tokens_per_entry
        if space.kind == "paged":
            total += -closed % size * (region.nbytes // size)
    return total


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 127, 128, 129, 131, 132, 255, 256, 257, 385, 1000])
@pytest.mark.parametrize("here", [{}, {"page_size": 128}, {"window_page_size": 32}])
def test_six_kinds_of_state_each_with_its_own_geometry(tokens, here):
    """sglang#29651, vllm#50714."""
    source, dest = dsv4(), dsv4(**here)
    roles = {region.role.rpartition(".scale")[0] or region.role for region in dest.layout.regions}
    assert {role.partition(".")[2] for role in roles} >= {"latent", "index_key", "state"}
    _, sent = hand_off([source], dest, tokens)
    # rows of 24 + 16 bytes and a scale byte, keys of 16 + 4, floats of 4 bytes; no dead row but
    # where a last page is one run
    row, c4, c128 = 24 + 2 * 8 + 1, tokens // 4, tokens // 128
    ring4 = 4 * 4 * (32 + 16) * (tokens - max(0, c4 * 4 - 4))
    ring128 = 4 * 2 * 32 * (tokens - c128 * 128)
    window = 5 * row * min(tokens, 128)
    live = window + 2 * (c4 * (row + 20) + ring4) + 2 * (c128 * row + ring128)
    entries = 5 * min(tokens, 128) + 2 * c4 + 2 * c128
    assert live <= sum(sent) <= live + entries + padding(dest, tokens) + dead(dest, tokens)


@pytest.mark.parametrize("prefix", [0, 255, 256, 299, 300])
def test_rings_and_slots_come_whole_though_decode_has_a_prefix(prefix):
    """sglang#29651, #26288: per-request state is in no prefix cache."""
    for build in (dsv4, hybrid):
        source, dest, positions = build(), build(), range(min(prefix, 160), 160)
        address, into = place(source, 160, 1), place(dest, 160)
        fill(source, address)
        blank(dest)
        move([source], dest, [address], into, positions)
        assert_holds(dest, into, positions)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4)])
def test_equal_lengths_of_k_v_and_states_have_no_effect(prefill, decode):
    """TensorRT-LLM#16237."""

    def rank(number, size):
        linear = LinearState((("q", 4, 16),), 1, 4, (4, 4), temporal_dtype="bf16")
        full = MHA(4, 16)  # at one rank a page of one token is as long as either state
        more = {"page_size": 1, "num_pages": 40, "shard": Shard(number, size)}
        return hybrid(range(4), linear=linear, full=full, **more)

    whole = rank(0, 1).layout
    assert len({b.item_bytes for b in whole.buffers}) == 1
    sources = [rank(number, prefill) for number in range(prefill)]
    for number in range(decode):
        hand_off(sources, rank(number, decode), 21)


@pytest.mark.parametrize("engines_own", [True, False], ids=["two tensors", "one row"])
def test_two_tensors_for_one_latent_are_both_moved(engines_own):
    """ATOM#1737: an fp8 part and a bf16 part."""

    def apart(pages):
        tensors = [
            torch.zeros(pages, 16, 512, dtype=torch.float8_e4m3fn),
            torch.zeros(pages, 16, 4, dtype=torch.float32),
            torch.zeros(pages, 16, 64, dtype=torch.bfloat16),
        ]
        seen = [
            describe(tensor, ("item", "entry", "dim"), role=role, layer=0, cell="dim")
            for tensor, role in zip(tensors, ("latent", "latent.scale", "rope"))
        ]
        layout = PoolLayout.of(*seen, spaces=[Space("kv", entries_per_item=16)])
        raw = [tensor.view(torch.uint8) for tensor in tensors]
        keys = [region.key for region in layout.regions]
        views = dict(zip(keys, (x.numpy() for x in raw)))
        return State(layout, [x.flatten().numpy() for x in raw], views)

    source = apart(7)
    rows = MLAPool(layers=[0], num_pages=9, page_size=16, packing="fp8")
    _, sent = hand_off([source], apart(9) if engines_own else rows, 50)
    assert sent == [50 * 656]
