"""Our own pools in one block pool pair with static ones, and with one another in other groups:
every byte of both sides is compared.
"""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from kvpool import Shard
from tests.oracle import assert_holds, elsewhere, move, staged, write
from tests.pools import dsv4, hybrid, hybrid_mla, hybrid_nsa, nsa, swa

POOLS = {
    "nsa": nsa.but(layers=range(5), total_kv_layers=5),
    "swa": swa.but(layers=range(7), total_kv_layers=7, window_layers=(0, 1, 3, 4, 6)),
    "hybrid": hybrid.but(layers=range(6), total_kv_layers=6, linear_layers=(0, 1, 2, 4)),
    "hybrid mla": hybrid_mla.but(layers=range(5), total_kv_layers=5),
    "hybrid nsa": hybrid_nsa,
    "dsv4": dsv4.but(layers=range(6), total_kv_layers=6, compress_ratios=(0, 2, 8, 2, 0, 8)),
}
RATIO = {"dsv4": 8}  # every compress ratio must divide a page


@st.composite
def sides(draw, name, placement):
    """Arguments of every rank of a side."""
    more = {"placement": placement, "num_pages": 900, "num_window_pages": 300, "num_slots": 5}
    more["page_size"] = RATIO.get(name, 1) * draw(st.integers(1, 4))
    if name in ("swa", "dsv4"):
        more["window_page_size"] = draw(st.integers(1, 5))
    size = draw(st.sampled_from((1, 2)))
    layers = POOLS[name].arguments["layers"]
    cut = draw(st.integers(0, len(layers) - 1))
    stages = [part for part in (layers[:cut], layers[cut:]) if part]
    return [
        {**more, "shard": Shard(rank, size), "layers": part, "total_kv_layers": len(layers)}
        for part in stages
        for rank in range(size)
    ]


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(POOLS)),
    st.sampled_from([("block", "layer"), ("page", "block"), ("block", "block")]),
    st.integers(1, 40),
    st.data(),
)
def test_any_pool_in_blocks_pairs_with_any_other_to_the_byte(name, placements, tokens, data):
    sources, dests = (data.draw(sides(name, placement)) for placement in placements)
    build, packing = POOLS[name], data.draw(st.sampled_from(("bf16", "fp8")))
    into = build(packing=packing, **data.draw(st.sampled_from(dests)))
    pools = [build(packing=packing, **more) for more in sources]
    prefix = data.draw(st.sampled_from((0, 0, tokens // 2)), label="prefix")
    there, here = staged(pools, into, tokens, prefix=prefix)
    write(into, other := elsewhere(into, here), range(tokens))
    move(pools, into, there, here, range(prefix, tokens))
    assert_holds(into, here, range(prefix, tokens), kept=range(prefix), also=[other])
