"""Reported failures, reproduced on small MHA and MLA pools; every byte is compared."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.plan import IncompatibleLayouts, plan
from kvpool.item import Cell, Repeat, Seq, item_bytes
from kvpool.layout import RequestAddress, Span
from kvpool.layout.formats import Shard
from kvpool.pools.typed import MHAPool, MLAPool
from tests.oracle import assert_holds, blank, built, fill, hand_off, move, pages_for, place


def pool(kind, sizes, layers=range(2), *, tokens=50, page=16, rank=0, tp=1, **options):
    common = {"num_pages": pages_for(tokens, page), "page_size": page, "shard": Shard(rank, tp)}
    return kind(**{"layers": layers, "dtype": "bf16", **common, **sizes, **options})


def mha(layers=range(2), *, heads=4, dims=(4, 4), **options):
    sizes = {"num_kv_heads": heads, "head_dim": dims[0], "v_head_dim": dims[1]}
    return pool(MHAPool, sizes, layers, **options)


def mla(layers=range(2), *, dims=(8, 4), **options):
    sizes = {"kv_lora_rank": dims[0], "qk_rope_head_dim": dims[1]}
    return pool(MLAPool, sizes, layers, **options)


STAGES = {
    "30 over PP4": (8, 8, 8, 6),
    "62 over PP4": (15, 16, 16, 15),
    "94 over PP4": (24, 24, 24, 22),
    "94 over PP8": (12, 12, 12, 12, 12, 12, 11, 11),
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("placement", ["layer", "page"])
def test_uneven_stages_land_layer_by_layer_k_and_v(stages, placement):
    """sglang#33457, #27740: every V buffer was written to a wrong place."""
    ends = np.cumsum(stages)
    sources = [
        mha(range(end - size, end), total_kv_layers=ends[-1], placement=placement)
        for size, end in zip(stages, ends)
    ]
    hand_off(sources, mha(range(ends[-1])), 37)


@pytest.mark.parametrize("stage", range(3))
def test_uneven_stages_land_in_uneven_stages(stage):
    """sglang#33457, with decode in stages too."""
    sources = [mha(layers, total_kv_layers=30) for layers in (range(17), range(17, 30))]
    dest = mha((range(5), range(5, 22), range(22, 30))[stage], total_kv_layers=30)
    transfer, _ = hand_off(sources, dest, 37)
    assert transfer.contributors() == [[0], [0, 1], [1]][stage]


@pytest.mark.parametrize(
    ("heads", "prefill", "decode"), [(2, 1, 4), (2, 4, 1), (4, 8, 16), (4, 16, 8), (2, 4, 4)]
)
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_fewer_heads_than_ranks_elect_one_replica(heads, prefill, decode, order):
    """sglang#19086, #23746, #31968."""
    sources = [mha(heads=heads, rank=rank, tp=prefill) for rank in range(prefill)]
    for rank in range(decode):
        dest = mha(heads=heads, rank=rank, tp=decode, order=order)
        _, sent = hand_off(sources, dest, 37)
        # tokens, heads, K and V, layers, dim, bf16
        assert sum(sent) == 37 * max(1, heads // decode) * 2 * 2 * 4 * 2


@pytest.mark.parametrize(("prefill", "decode"), [(32, 16), (16, 32), (128, 64), (48, 64), (64, 48)])
@pytest.mark.parametrize("tokens", [1, 95, 96, 97, 200])
def test_pages_of_another_size_with_a_partial_last_page(prefill, decode, tokens):
    """vllm#42895."""
    for kind in (mha, mla):
        hand_off([kind(page=prefill, tokens=tokens)], kind(page=decode, tokens=tokens), tokens)


@pytest.mark.parametrize(("prefill", "decode"), [("nhd", "hnd"), ("hnd", "nhd")])
@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 1), (2, 4), (4, 2)])
def test_heads_and_tokens_change_order(prefill, decode, source_tp, dest_tp):
    """vllm#46204, TensorRT-LLM#16017."""
    sources = [mha(order=prefill, rank=rank, tp=source_tp) for rank in range(source_tp)]
    for rank in range(dest_tp):
        hand_off(sources, mha(order=decode, rank=rank, tp=dest_tp), 37)


ROW_656 = Seq(Cell("latent", 512, "e4m3"), Cell("latent.scale", 4, "f32"), Cell("rope", 64, "bf16"))


def test_rows_of_656_bytes_and_of_1152_bytes_refuse_each_other():
    """sglang#19398; vllm's Mooncake connector accepts it."""
    page = Repeat("entry", 64, ROW_656)
    assert item_bytes(page) == 41_984
    fp8 = built([(0, "kv", 4, page), (1, "kv", 4, page)], page=64)
    bf16 = mla(dims=(512, 64), page=64)
    for source, dest, there, here in (
        (fp8, bf16, "float8_e4m3fn", "bfloat16"),
        (bf16, fp8, "bfloat16", "float8_e4m3fn"),
    ):
        fill(source, place(source, 50))
        blank(dest)
        with pytest.raises(IncompatibleLayouts) as refused:
            move([source], dest, [place(source, 50)], place(dest, 50))
        assert f"target layers 0-1 latent: {there} on prefill, {here} on decode" in str(
            refused.value
        )
        reasons = {(r.owner, r.layer, r.role) for r in refused.value.reasons}
        assert reasons == {("target", layer, "latent") for layer in range(2)}
        assert_holds(dest, place(dest, 50), range(0))


def test_bf16_and_fp8_pools_refuse_each_other():
    """sglang#19398."""
    source, dest = mha(dtype="bf16"), mha(dtype="e4m3")
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout], dest.layout)
    for role in ("k", "v"):
        assert f"target layers 0-1 {role}: bfloat16 on prefill, float8_e4m3fn on decode" in str(
            refused.value
        )


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_equal_lengths_at_one_tp_and_not_at_another_have_no_effect(prefill, decode):
    """TensorRT-LLM#16237."""

    def rank_of(rank, tp):
        heads = Shard(rank, tp).of(4)
        k, v = (
            Repeat("entry", 16, Repeat("head", heads[1], Cell(role, 8, "uint8"), heads[0], 4))
            for role in ("k", "v")
        )
        index = Repeat("entry", 16, Cell("index_key", 16, "uint8"))  # as K and V of two heads
        templates = (index, v, k) if tp == 2 else (k, v, index)
        return built([(n, "kv", 7, t) for n in range(2) for t in templates], page=16)

    sources = [rank_of(rank, prefill) for rank in range(prefill)]
    for rank in range(decode):
        hand_off(sources, rank_of(rank, decode), 37)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_k_and_v_of_different_head_size(prefill, decode, order):
    """sglang's NIXL and MoRI paths used K's length for V."""
    sources = [mha(dims=(192, 128), rank=rank, tp=prefill) for rank in range(prefill)]
    for rank in range(decode):
        dest = mha(dims=(192, 128), rank=rank, tp=decode, order=order)
        _, sent = hand_off(sources, dest, 37)
        assert sum(sent) == 37 * (4 // decode) * (192 + 128) * 2 * 2  # tokens, heads, layers, bf16


@pytest.mark.parametrize("page", [64, 16])
def test_addresses_of_1_7_million_tokens_in_160_regions_do_not_wrap(page):
    """sglang: flat indices were int32."""
    tokens, heads, dim = 1_700_000, 8, 128

    def layout(size):
        pages = -(-tokens // size) + 1
        sizes = {"heads": heads, "dims": (dim, dim), "num_pages": pages, "device": "meta"}
        return mha(range(80), page=size, **sizes).layout

    def ids(size, seed):
        return np.random.default_rng(seed).permutation(-(-tokens // size)) + 1

    def at(layer, role, page_id, size, position):
        """Offset of a token's K or V in a layer, in Python's integers."""
        row, pages = heads * dim * 2, -(-tokens // size) + 1
        number = layer + 80 * (role == "v")
        return (number * pages + page_id) * size * row + position % size * row

    there, here = ids(64, 1), ids(page, 2)
    transfer = plan([layout(64)], layout(page))
    batch = transfer.bind(
        0, RequestAddress(tokens, {"kv": Span(there)}), RequestAddress(tokens, {"kv": Span(here)})
    )
    assert batch.total == 160 * tokens * heads * dim * 2
    assert batch.total > 2**38 and int(batch.dst.max()) > 2**38
    order = np.argsort(batch.dst)
    for layer in (0, 39, 79):
        for role in ("k", "v"):
            for position in (0, 65_537, 1_048_576 + 5, tokens - 1):
                src = at(layer, role, int(there[position // 64]), 64, position)
                dst = at(layer, role, int(here[position // page]), page, position)
                run = order[np.searchsorted(batch.dst, dst, side="right", sorter=order) - 1]
                into = dst - int(batch.dst[run])
                assert 0 <= into < int(batch.nbytes[run])
                assert int(batch.src[run]) + into == src


@pytest.mark.parametrize(
    ("placement", "into"), [("layer", "layer"), ("page", "layer"), ("page", "page")]
)
def test_a_replicated_latent_is_sent_once_and_all_replicas_send(placement, into):
    """TensorRT-LLM's duplicate-head factors for MLA."""
    sources = [mla(range(8), rank=rank, tp=4, placement=placement) for rank in range(4)]
    for rank in range(2):
        dest = mla(range(8), rank=rank, tp=2, placement=into)
        transfer, sent = hand_off(sources, dest, 48)
        assert transfer.contributors() == [0, 1, 2, 3]
        assert sent == [48 * 2 * 12 * 2] * 4  # tokens, layers a sender, elements, bf16


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 32, 36, 37])
@pytest.mark.parametrize(("prefill", "decode"), [(16, 16), (32, 16), (16, 32)])
def test_only_what_follows_a_prefix_is_sent(prefix, prefill, decode):
    """sglang#26288."""
    for kind in (mha, mla):
        _, sent = hand_off([kind(page=prefill)], kind(page=decode), 37, prefix=prefix)
        row = 2 * 2 * (4 * 8 if kind is mha else 12)  # layers, bf16, elements
        assert sum(sent) == (37 - prefix) * row
