"""Plans: refusals, unsent regions, numbers of runs, and every kind of space."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from disagg.plan import IncompatibleLayouts, IncompleteTransfer, plan
from kvpool.describe import describe, describe_buffer
from kvpool.item import Cell, Pad, Repeat, Seq, Skip
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.formats import Shard
from kvpool.pools.typed import MHAPool, MLAPool
from tests.oracle import State, apply, assert_holds, blank, built, fill, hand_off, move, place
from tests.pools import PACKED

COMMON = {"num_pages": 12, "page_size": 4, "dtype": "bf16"}


def mha(layers=range(2), **options):
    return MHAPool(layers=layers, num_kv_heads=4, head_dim=4, **{**COMMON, **options})


def mla(layers=range(2), **options):
    return MLAPool(layers=layers, kv_lora_rank=8, qk_rope_head_dim=4, **{**COMMON, **options})


def refusal(sources, dest, **options):
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout for source in sources], dest.layout, **options)
    return refused.value


def test_all_reasons_are_listed_at_once():
    page = Repeat("entry", 4, Seq(Cell("latent", 8, "bf16"), Cell("rope", 4, "bf16")))
    wide = Repeat("entry", 4, Seq(Cell("latent", 16, "bf16"), Cell("rope", 4, "f32")))
    index = Repeat("entry", 4, Cell("index_key", 4, "bf16"))
    source = built([(0, "kv", 5, page), (1, "kv", 5, page)], page=4)
    dest = built([(0, "kv", 5, wide), (1, "kv", 5, page), (1, "kv", 5, index)], page=4)
    refused = refusal([source], dest)
    assert [(r.owner, r.layer, r.role) for r in refused.reasons] == [
        ("target", 0, "latent"),
        ("target", 0, "rope"),
        ("target", 1, "index_key"),
    ]
    text = str(refused)
    assert text.startswith("3 reasons.\n")
    says = "8 elements per cell on prefill, 16 elements per cell on decode."
    assert f"target layer 0 latent: {says}" in text
    assert "target layer 0 rope: bfloat16 on prefill, float32 on decode." in text
    assert "target layer 1 index_key: prefill offers no such region" in text
    assert "it holds none" in text


def test_raw_bytes_without_a_type_are_told_how_to_have_one():
    refused = refusal([mla(range(1), dtype="uint8")], mla(range(1), dtype="e4m3"))
    assert "uint8 on prefill, float8_e4m3fn on decode. " in str(refused)
    assert "or give describe(dtype=...) of a tensor that holds raw bytes." in str(refused)


def test_layers_that_share_a_reason_share_a_line():
    refused = refusal([mla(range(6))], mla(range(6), dtype="e4m3"))
    assert len(refused.reasons) == 12
    assert str(refused).splitlines()[1:] == [
        f"  target layers 0-5 {role}: bfloat16 on prefill, float8_e4m3fn on decode. "
        "Build both pools with the same dtype and packing. Or let decode convert bfloat16 to "
        "float8_e4m3fn: cast=True."
        for role in ("latent", "rope")
    ]


PAGE = Repeat("entry", 4, Repeat("head", 2, Cell("k", 4, "bf16")))
CLASHES = {
    "axis names": (
        Repeat("entry", 4, Repeat("channel", 2, Cell("k", 4, "bf16"))),
        Space("kv", entries_per_item=4),
        "['head'] axes on prefill, ['channel'] axes on decode",
    ),
    "axis totals": (
        Repeat("entry", 4, Repeat("head", 2, Cell("k", 4, "bf16"), 0, 8)),
        Space("kv", entries_per_item=4),
        "{'head': 2} in total on prefill, {'head': 8} in total on decode",
    ),
    "kind of space": (
        Repeat("head", 2, Cell("k", 4, "bf16")),
        Space("kv", "slot"),
        "paged space on prefill, slot space on decode",
    ),
    "tokens per entry": (
        PAGE,
        Space("kv", entries_per_item=4, tokens_per_entry=2),
        "1 tokens per entry on prefill, 2 tokens per entry on decode",
    ),
}


@pytest.mark.parametrize(("template", "space", "sentence"), CLASHES.values(), ids=CLASHES.keys())
def test_a_refusal_names_region_and_both_values(template, space, sentence):
    source = built([(0, "kv", 5, PAGE)], page=4)
    refused = refusal([source], built([(0, "kv", 5, template)], [space]))
    assert f"target layer 0 k: {sentence}" in str(refused)


def test_a_missing_owner_is_refused_unless_allowed_by_owner_or_role():
    target, draft = mla(range(2)), mla(range(1), owner="draft", total_kv_layers=2)
    dest = PoolLayout.merge(target.layout, draft.layout)
    with pytest.raises(IncompatibleLayouts, match="draft layer 0 latent: prefill offers no such"):
        plan([target.layout], dest)
    with pytest.raises(IncompatibleLayouts, match=r"1 reason\.\n  draft layer 0 rope"):
        plan([target.layout], dest, allow_missing={"latent"})
    for allowed in ({"draft"}, {"latent", "rope"}):
        made = plan([target.layout], dest, allow_missing=allowed)
        assert made.missing == (("draft", 0, "latent"), ("draft", 0, "rope"))


def test_regions_of_sources_only_are_named_and_not_sent():
    target, dest = mha(range(2)), mha(range(1, 2), total_kv_layers=2)
    draft = mha(range(1), owner="draft", total_kv_layers=2)
    made = plan([PoolLayout.merge(target.layout, draft.layout)], dest.layout)
    assert set(made.unsent) == {(owner, 0, r) for owner in ("target", "draft") for r in "kv"}
    batch = made.bind(0, place(dest, 20), place(dest, 20))
    assert batch.total == 20 * 2 * 4 * 4 * 2


def test_a_forgotten_rank_is_refused_with_the_offered_heads():
    ranks = [mha(shard=Shard(rank, 4)) for rank in range(4)]
    refused = refusal([ranks[0], ranks[3]], mha())
    assert (
        "target layers 0-1 k: decode needs head 0-3, prefill offers head 0; head 3, which "
        "does not cover it exactly once. Plan with the layouts of all prefill ranks."
    ) in str(refused)
    assert "offers none of it" in str(refusal(ranks[:1], mha(shard=Shard(3, 4))))


def test_a_forgotten_stage_is_refused_with_the_held_layers():
    stages = [mha(layers, total_kv_layers=9) for layers in (range(3), range(3, 6), range(6, 9))]
    refused = refusal([stages[0], stages[2]], mha(range(9)))
    assert {r.layer for r in refused.reasons} == {3, 4, 5}
    says = "target layers 3-5 k: prefill offers no such region (it holds layers 0-2, 6-8)"
    assert says in str(refused)


def test_invalid_block_tables_and_ranges_are_refused():
    source, dest = mla(), mla()
    made = plan([source.layout], dest.layout)
    here = place(dest, 10)
    with pytest.raises(ValueError, match="2 block tables for 1 sources"):
        made.bind_all([here, here], here)
    with pytest.raises(ValueError, match="source 1: this plan has sources 0 to 0"):
        made.bind(1, here, here)
    for tokens in (range(5, 11), range(0, 10, 2), range(-1, 4)):
        with pytest.raises(ValueError, match="a range of positions within 0 to 10"):
            made.bind(0, here, here, tokens=tokens)
    with pytest.raises(ValueError, match="destination: its block table has no ids for space 'kv'"):
        made.bind(0, here, RequestAddress(10, {}))


def pages(*ids, tokens=None):
    return RequestAddress(4 * len(ids) if tokens is None else tokens, {"kv": Span(list(ids))})


LATENT, ROPE = Cell("latent", 8, "bf16"), Cell("rope", 4, "bf16")


def with_gap(where, page, gap):
    """A page of latent and rope rows with 8 other bytes in or between them."""
    row, gaps = Seq(LATENT, ROPE), Repeat("entry", page, gap) if isinstance(gap, Cell) else gap
    rows = Repeat("entry", page, row)
    if isinstance(gap, Skip):
        gaps = Skip(gap.nbytes * page)
    return {
        "in the row": Repeat("entry", page, Seq(LATENT, gap, ROPE)),
        "behind the row": Repeat("entry", page, Seq(row, gap)),
        "before the row": Repeat("entry", page, Seq(gap, row)),
        "behind the page": Seq(rows, gaps),
        "before the page": Seq(gaps, rows),
    }[where]


GAPS = ["in the row", "behind the row", "before the row", "behind the page", "before the page"]
INDEX, NOTHING = Cell("index_key", 4, "bf16"), Skip(8)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("where", GAPS)
def test_live_bytes_of_decode_are_not_padding(where, page, seed):
    template = with_gap(where, page, NOTHING)
    source = built([(layer, "kv", 14, template) for layer in range(3)], page=page)
    kinds = (NOTHING, INDEX, NOTHING)  # index keys on a subset of layers
    parts = [(layer, "kv", 14, with_gap(where, page, kind)) for layer, kind in enumerate(kinds)]
    dest = built(parts, page=page)
    hand_off([source], dest, 11, seed=seed, allow_missing={"index_key"})


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("where", GAPS)
def test_live_bytes_of_prefill_are_not_sent_as_padding(where, page, seed):
    source, dest = (
        built([(0, "kv", 14, with_gap(where, page, gap))], page=page) for gap in (INDEX, NOTHING)
    )
    assert hand_off([source], dest, 11, seed=seed)[1] == [11 * 24]


def test_layers_that_another_replica_sends_are_not_sent_between_pages():
    replicas = [mla(range(4), shard=Shard(rank, 2), placement="page") for rank in range(2)]
    dest = mla(range(4), placement="page")
    assert hand_off(replicas, dest, 40, seed=None)[1] == [40 * 24 * 2] * 2


def test_bytes_that_overlapping_sources_offer_are_read_once():
    sources = [mha(), mha(shard=Shard(0, 2)), mha(shard=Shard(3, 4))]
    assert sum(hand_off(sources, mha(), 30)[1]) == 30 * 2 * 2 * 4 * 4 * 2


@pytest.mark.parametrize("tokens", [12, 11, 9])
def test_consecutive_pages_are_one_run_per_layer(tokens):
    source, dest = mla(range(5)), mla(range(5))
    there, here = pages(2, 3, 4, tokens=tokens), pages(7, 8, 9, tokens=tokens)
    batch = plan([source.layout], dest.layout).bind(0, there, here)
    assert batch.nbytes.tolist() == [tokens * 24] * 5


def test_adjacent_heads_of_a_token_are_one_run():
    ranks = [mha(shard=Shard(rank, 2)) for rank in range(2)]
    made = plan([rank.layout for rank in ranks], mha().layout)
    for batch in made.bind_all([pages(2, 9)] * 2, pages(5, 3)):
        assert batch.nbytes.tolist() == [2 * 4 * 2] * (8 * 2 * 2)  # tokens, K and V, layers


@pytest.mark.parametrize("kind", [mha, mla])
def test_all_layers_of_a_page_placed_side_by_side_are_one_run(kind):
    source, dest = (kind(range(5), placement="page") for _ in range(2))
    made = plan([source.layout], dest.layout)
    row = 24 if kind is mla else 2 * 4 * 4 * 2
    scattered = made.bind(0, pages(2, 9, 4), pages(7, 3, 5))
    assert scattered.nbytes.tolist() == [4 * row * 5] * 3
    one = made.bind(0, pages(2, 9, 4), pages(7, 3, 5), layers=range(1, 2))
    assert one.nbytes.tolist() == ([4 * row] * 3 if kind is mla else [2 * row] * 6)
    consecutive = made.bind(0, pages(2, 3, 4), pages(7, 8, 9))
    assert consecutive.nbytes.tolist() == [3 * 4 * row * 5]


def test_equal_padding_is_part_of_a_run():
    row = Seq(Cell("latent", 3, "bf16"), Skip(2), Cell("rope", 1, "f32"))
    page = Pad(64, Repeat("entry", 4, row))
    sides = [built([(0, "kv", 12, page)], page=4) for _ in range(2)]
    batch = plan([sides[0].layout], sides[1].layout).bind(0, pages(2, 3, 4), pages(7, 8, 9))
    assert batch.runs == 1
    hand_off(sides[:1], sides[1], 30)


@pytest.mark.parametrize("declared", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("where", GAPS)
def test_what_one_side_does_not_declare_padding_is_not_moved(where, declared):
    template = with_gap(where, 4, NOTHING)
    sides = [
        built([(layer, "kv", 14, template) for layer in range(2)], page=4, padding=padding)
        for padding in declared
    ]
    for seed in (0, None):
        assert hand_off(sides[:1], sides[1], 11, seed=seed)[1] == [2 * 11 * 24]


def test_unequal_padding_is_not_moved():
    row = Cell("latent", 3, "bf16"), Cell("rope", 1, "f32")
    source = built([(0, "kv", 12, Repeat("entry", 4, Seq(row[0], Skip(2), row[1])))], page=4)
    dest = built([(0, "kv", 12, Repeat("entry", 4, Seq(row[1], row[0], Skip(6))))], page=4)
    hand_off([source], dest, 30)
    hand_off([dest], source, 30)


@pytest.mark.parametrize("tokens", [1, 40, 64, 65, 384])
def test_one_page_of_thousands_of_runs_is_byte_exact(tokens):
    sizes = {"num_kv_heads": 8, "head_dim": 4, "dtype": "bf16", "page_size": 64, "num_pages": 8}
    source, dest = (MHAPool(layers=range(3), order=order, **sizes) for order in ("nhd", "hnd"))
    transfer, _ = hand_off([source], dest, tokens)
    runs = 6 * 8 * tokens
    assert transfer.bind(0, place(source, tokens), place(dest, tokens)).runs == runs


def test_a_batch_splits_without_losing_a_run():
    batch = plan([mla().layout], mla().layout).bind(0, pages(2, 9, 4), pages(7, 3, 5))
    parts = list(batch.split(max_bytes=200, max_runs=5))
    assert [part.nbytes.tolist() for part in parts] == [[96, 96]] * 3
    assert np.concatenate([part.dst for part in parts]).tolist() == batch.dst.tolist()


def test_shares_are_runs_and_bytes_of_each_route():
    pool = PACKED["nsa bf16"](num_pages=20)
    made = plan([pool.layout], pool.layout)
    batch = made.bind(0, place(pool, 29, 1), place(pool, 29, 2))
    assert {route for route, _, _ in batch.shares} == set(made.routes)
    assert sum(runs for _, runs, _ in batch.shares) == batch.runs
    assert sum(nbytes for _, _, nbytes in batch.shares) == batch.total
    for route in made.routes:
        inside = np.zeros(batch.runs, dtype=bool)
        for name in route.src.buffers:
            base = pool.layout.buffer_by_name[name].base
            size = route.src.stride * pool.num_pages
            inside |= (batch.src >= base) & (batch.src < base + size)
        mine = [(runs, nbytes) for each, runs, nbytes in batch.shares if each is route]
        assert sum(runs for runs, _ in mine) == inside.sum()
        assert sum(nbytes for _, nbytes in mine) == batch.nbytes[inside].sum()


def npu_style(layers, items, page, dims):
    """Latent and rope in two tensors `[L, I, E, 1, D]`, each stacked over layers."""
    parts, memory, views = [], [], {}
    for role, dim in zip(("latent", "rope"), dims):
        tensor = torch.zeros(len(layers), items, page, 1, dim, dtype=torch.bfloat16)
        seen = describe(
            tensor[:, :, :, 0], ("layer", "item", "entry", "dim"), role=role, layer=layers
        )
        parts.append(seen)
        memory.append(tensor.view(torch.uint8).numpy().reshape(-1))
        for number, layer in enumerate(layers):
            views["target", layer, role] = tensor[number, :, :, 0].view(torch.uint8).numpy()
    space = Space("kv", entries_per_item=page)
    layout = PoolLayout.of(*parts, spaces=[space], total_kv_layers=max(layers) + 1)
    return State(layout, memory, views)


def described(named, page, buffer=None):
    """State of tensors `[I, E, D]`, one for each layer and role, in `buffer` if there is one."""
    seen = {
        key: describe(tensor, ("item", "entry", "dim"), layer=key[0], role=key[1], buffer=buffer)
        for key, tensor in named.items()
    }
    space = Space("kv", entries_per_item=page)
    total = max(layer for layer, _ in named) + 1
    layout = PoolLayout.of(*seen.values(), spaces=[space], total_kv_layers=total)
    whole = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in named.values()}
    memory = [torch.empty(0, dtype=torch.uint8).set_(each).numpy() for each in whole.values()]
    views = {("target", *key): tensor.view(torch.uint8).numpy() for key, tensor in named.items()}
    return State(layout, memory, views)


def test_layers_that_differ_in_item_stride_only_keep_their_own():
    dense, wide = torch.zeros(12, 4, 6, dtype=torch.float32), torch.zeros(12, 7, 6)
    engine = described({(0, "latent"): dense, (1, "latent"): wide[:, :4]}, 4)
    template = Repeat("entry", 4, Cell("latent", 6, "f32"))
    pool = built([(layer, "kv", 12, template) for layer in range(2)], page=4)
    hand_off([engine], pool, 30)
    hand_off([pool], engine, 30)


def test_cells_adjacent_in_one_entry_only_are_no_run():
    crossed = torch.zeros(12, 24, dtype=torch.float32)
    latent = crossed.as_strided((12, 2, 2), (24, 8, 1), 0)  # at 0 and 8
    rope = crossed.as_strided((12, 2, 2), (24, 4, 1), 2)  # at 2 and 6
    buffer = describe_buffer(crossed, ("item", "byte"), name="crossed")
    engine = described({(0, "latent"): latent, (0, "rope"): rope}, 2, buffer)
    row = Seq(Cell("latent", 2, "f32"), Cell("rope", 2, "f32"))
    pool = built([(0, "kv", 12, Repeat("entry", 2, row))], page=2)
    hand_off([engine], pool, 19)
    hand_off([pool], engine, 19)


ORDERS = [
    ("item", "role", "head", "entry", "dim"),
    ("item", "role", "entry", "head", "dim"),
    ("item", "entry", "role", "head", "dim"),
    ("role", "item", "head", "entry", "dim"),
]


@pytest.mark.parametrize("dims", ORDERS, ids="-".join)
def test_k_and_v_in_one_tensor_of_any_dim_order_go_to_a_pool(dims):
    sizes = {"item": 12, "role": 2, "head": 4, "entry": 6, "dim": 4}
    tensor = torch.zeros([sizes[dim] for dim in dims], dtype=torch.bfloat16)
    within = dims[0] == "item"  # both in one buffer, as their entries may interleave
    buffer = describe_buffer(tensor, dims, name="k and v") if within else None
    seen = describe(tensor, dims, role=("k", "v"), layer=0, buffer=buffer)
    space = Space("kv", entries_per_item=6)
    apart = tensor.permute([dims.index(d) for d in ("role", "item", "entry", "head", "dim")])
    views = {("target", 0, role): part.view(torch.uint8).numpy() for role, part in zip("kv", apart)}
    layout = PoolLayout(seen.buffers, seen.regions, (space,), 1)
    engine = State(layout, [tensor.view(torch.uint8).numpy().reshape(-1)], views)
    hand_off([engine], mha(range(1)), 30)
    hand_off([mha(range(1))], engine, 30)


def window(size, page):
    template = Repeat("entry", page, Cell("swa.latent", 6, "bf16"))
    return built(
        [(layer, "swa", 60 // page + 2, template) for layer in range(2)],
        [Space("swa", entries_per_item=page, window=size)],
    )


@pytest.mark.parametrize("wanted", [12, None])
def test_entries_that_have_left_the_source_window_are_refused(wanted):
    source, dest = window(8, 4), window(wanted, 4)
    made = plan([source.layout], dest.layout)
    made.bind(0, place(source, 8), place(dest, 8))  # no entry has left it yet
    with pytest.raises(IncompleteTransfer, match="space swa"):
        made.bind(0, place(source, 50), place(dest, 50))


def test_a_chunk_vouches_only_for_entries_that_are_alive_at_the_end():
    source, dest = window(8, 4), window(12, 4)
    made = plan([source.layout], dest.layout)
    there, here = place(source, 16, 1), place(dest, 20)
    with pytest.raises(IncompleteTransfer, match="from 12 on alive, the destination needs 8 to 15"):
        made.bind(0, there, here, tokens=range(8, 16))
    plan([source.layout], source.layout).bind(0, there, place(source, 20), tokens=range(8, 16))


def ring(size):
    template = Repeat("entry", size, Cell("c4.state", 4, "f32"))
    space = Space("ring", "ring", entries_per_item=size, window=8)
    return built([(layer, "ring", 5, template) for layer in range(2)], [space])


def ring_of(kind, size):
    """The open window of 4 and the one before it: in a ring of each request, or 4 entries an item
    in the ring of a window's page, as SGLang has them on GPUs.
    """
    entries = size if kind == "ring" else 4
    template = Repeat("entry", entries, Cell("c4.state", 4, "f32"))
    space = Space("c4.ring", kind, entries, window=4, window_step=4)
    return built([(layer, "c4.ring", 70, template) for layer in range(2)], [space])


@pytest.mark.parametrize("tokens", [1, 4, 5, 9, 128, 255])
@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
@pytest.mark.parametrize("kinds", [("ring", "paged"), ("paged", "ring")])
def test_rings_of_requests_pair_with_rings_of_window_pages(tokens, sizes, kinds):
    source, dest = map(ring_of, kinds, sizes)
    there, here = place(source, tokens, 1), place(dest, tokens)
    chunks = [range(tokens)] if tokens < 6 else [range(5), range(5, tokens)]
    last = range(max(0, tokens - tokens % 4 - 4), tokens)
    blank(dest)
    fill(source, there, last)
    for chunk in chunks:  # what is alive in the end stays in a ring from its chunk on
        held = RequestAddress(chunk.stop, there.spans)
        move([source], dest, [held], here, chunk)
    assert_holds(dest, here, last)


def test_a_ring_that_holds_later_positions_is_refused():
    source, dest = ring(8), ring(16)
    made = plan([source.layout], dest.layout)
    made.bind(0, place(source, 40), place(dest, 40))
    with pytest.raises(IncompleteTransfer, match="space ring keeps entries from 33 on alive"):
        made.bind(0, place(source, 41), place(dest, 40))


def compressed(page):
    """Token pages, and compressed pages that share their ids."""
    return built(
        [
            (0, "kv", 14, Repeat("entry", page, Cell("latent", 4, "bf16"))),
            (0, "c4", 14, Repeat("entry", page // 4, Cell("c4.latent", 6, "bf16"))),
        ],
        [Space("c4", entries_per_item=page // 4, tokens_per_entry=4, ids="kv")],
        page=page,
    )


def test_chunks_move_each_compressed_entry_with_its_last_token():
    source, dest = compressed(8), compressed(16)
    there, here = place(source, 50, 1), place(dest, 50)
    fill(source, there)
    blank(dest)
    made = plan([source.layout], dest.layout)
    ends = (0, 3, 4, 6, 21, 22, 23, 50)
    sent = 0
    for start, stop in pairwise(ends):
        chunk = RequestAddress(stop, there.spans)
        batch = made.bind(0, chunk, here, tokens=range(start, stop))
        apply(batch, [source], dest)
        assert_holds(dest, here, range(stop))
        sent += batch.total
    assert sent == 50 * 8 + 12 * 12


def test_a_slot_is_moved_with_the_last_chunk_only():
    def pool():
        page = Repeat("entry", 4, Cell("latent", 4, "bf16"))
        return built(
            [(0, "kv", 12, page), (1, "state", 5, Cell("temporal", 8, "f32"))],
            [Space("state", "slot")],
            page=4,
        )

    source, dest = pool(), pool()
    there, here = place(source, 30, 1), place(dest, 30)
    blank(dest)
    for chunk in (range(13), range(13, 29), range(29, 30)):
        held = RequestAddress(chunk.stop, there.spans)
        fill(source, held)  # the slot holds the state of the chunk's last position
        move([source], dest, [held], here, chunk)
        assert_holds(dest, here, range(chunk.stop))
    with pytest.raises(IncompleteTransfer, match="the state in space state is that of 31 tokens"):
        plan([source.layout], dest.layout).bind(0, RequestAddress(31, there.spans), here)


SECTIONS = {"conv.q": (4, 3), "conv.k": (4, 3), "conv.v": (8, 5)}  # heads, dim


def test_conv_axes_of_a_described_tensor_are_those_of_a_template():
    channels = (  # `[role][head][dim][tap]`
        Repeat("head", heads, Repeat("dim", dim, Repeat("tap", 3, Cell(role, 1, "bf16"))))
        for role, (heads, dim) in SECTIONS.items()
    )
    source = built([(1, "state", 5, Seq(*channels))], [Space("state", "slot")])
    tensor = torch.zeros(5, 3, 4 * 3 + 4 * 3 + 8 * 5, dtype=torch.bfloat16)  # [I, tap, channel]
    buffer = describe_buffer(tensor, ("item", "tap", "channel"), name="conv", space="state")
    parts, views, at = [], {}, 0
    for role, (heads, dim) in SECTIONS.items():
        part = tensor[:, :, at : at + heads * dim].unflatten(2, (heads, dim))
        names = ("item", "tap", "head", "dim")
        seen = describe(part, names, role=role, layer=1, cell=None, buffer=buffer)
        parts.append(seen)
        shown = part.permute(0, 2, 3, 1)[..., None].view(torch.uint8)  # [I, head, dim, tap, byte]
        views["target", 1, role] = shown.numpy()
        at += heads * dim
    layout = PoolLayout.of(*parts, spaces=[Space("state", "slot")], total_kv_layers=2)
    dest = State(layout, [tensor.view(torch.uint8).numpy().reshape(-1)], views)
    hand_off([source], dest, 30)
