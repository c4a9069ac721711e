"""The fields of SGLang's KVArgs that a layout gives are those that SGLang fills in itself."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from disagg.connectors.sglang import kv_args
from kvpool import MLAPool
from kvpool.layout import LayoutError
from tests.engines.sglang import sides
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import described

RATIOS = [0, 4, 128, 4, 128, 0]


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


CASES = {
    "mha": lambda: Side(sides.mha(), None),
    "mha, a stage": lambda: Side(sides.mha(start=4), None),
    "mha, a draft": lambda: Side(sides.mha(), None, sides.mha(layers=1)),
    "mxfp8": lambda: Side(sides.mxfp8(), None),
    "mla": lambda: Side(sides.mla(), None),
    "dsa": lambda: Side(sides.dsa(), None),
    "dsa, a draft": lambda: Side(sides.dsa(), None, sides.dsa(layers=1)),
    "window": lambda: Side(sides.swa(), None, window=20),
    "window, kept whole": lambda: Side(sides.mha(), None, window=20, sliding=(0, 2)),
    "window, mxfp8": lambda: Side(sides.swa(inner="MHATokenToKVPoolMXFP8"), None, window=20),
    "gated delta net": lambda: Side(sides.hybrid(), None),
    "kimi delta net": lambda: Side(sides.hybrid(kind="kda", full="mla"), None),
    "mamba-2": lambda: Side(sides.hybrid(kind="mamba2"), None),
    "latents, index keys, slots": lambda: Side(sides.hybrid(64, full="dsa"), None),
    "a draft of K and V": lambda: Side(sides.hybrid(), None, sides.mha(layers=1)),
    "mla, NPU": lambda: Side(sides.npu_mla(), None),
    "deepseek v4": lambda: Side(sides.dsv4(RATIOS), None),
    "deepseek v4, drafts": lambda: Side(sides.dsv4(RATIOS, drafts=3), None, sides.dsv4([0])),
}
LISTS = (
    *("kv_data_ptrs", "kv_item_lens", "kv_layer_ids", "num_draft_entries", "page_size"),
    *("state_types", "state_data_ptrs", "state_item_lens", "state_layer_ids"),
    *("state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups"),
)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_layout_gives_the_lists_that_sglang_makes(make):
    side = make()
    made, expected = kv_args(described(side, 8, groups=2).layout), sides.own_args(side, 8)
    for name in LISTS:
        assert made[name] == getattr(expected, name), name
    for given, theirs, items in (
        (made["kv_data_lens"], expected.kv_data_lens, made["kv_item_lens"]),
        *zip(made["state_data_lens"], expected.state_data_lens, made["state_item_lens"]),
    ):  # of whole items: a ring of SGLang's is two of its items, and it may list a part of one
        assert all(0 <= b - a < 2 * item for a, b, item in zip(given, theirs, items))


def test_a_rank_says_its_heads():
    side = Side(sides.mha(heads=2), None, rank=1, ranks=2)
    made = kv_args(described(side, 8).layout)
    assert (made["kv_head_num"], made["total_kv_head_num"]) == (2, 4)
    assert (made["prefill_start_layer"], made["prefill_end_layer"]) == (0, 4)


def test_sglangs_own_object_has_all_the_fields():
    from sglang.srt.disaggregation.base.conn import KVArgs

    assert set(kv_args(described(Side(sides.dsa(), None), 8).layout)) <= set(KVArgs.__annotations__)


def test_pages_of_all_layers_are_refused():
    pool = MLAPool(layers=range(2), num_pages=4, page_size=16, dtype="bf16", placement="page")
    with pytest.raises(LayoutError, match="placement='layer'"):
        kv_args(pool.layout)
