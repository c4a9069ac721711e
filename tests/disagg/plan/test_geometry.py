"""Transfers between any two geometries of a model, or of linear states of a kind, are byte-exact
and write nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import IncompleteTransfer, plan
from kvpool import MHA, HybridLinearPool, MHAPool, MLAPool, RequestAddress, Shard, Span
from kvpool.layout.formats.linear import lightning, mamba1, mamba2, short_conv
from tests.oracle import hand_off, pages_for, place

DTYPES = ("uint8", "float8_e4m3fn", "bfloat16", "float32")


@dataclass(frozen=True)
class Model:
    kind: str
    layers: int
    heads: int
    dims: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class Side:
    cuts: tuple[int, ...]
    tp: int
    page: int
    order: str
    placement: str

    def pool(self, model, stage, rank, tokens, device="cpu"):
        common = {
            "layers": range(self.cuts[stage], self.cuts[stage + 1]),
            "total_kv_layers": model.layers,
            "num_pages": pages_for(tokens, self.page),
            "page_size": self.page,
            "dtype": model.dtype,
            "shard": Shard(rank, self.tp),
            "placement": self.placement,
            "device": device,
        }
        first, second = model.dims
        if model.kind == "mla":
            return MLAPool(kv_lora_rank=first, qk_rope_head_dim=second, **common)
        return MHAPool(
            num_kv_heads=model.heads, head_dim=first, v_head_dim=second, order=self.order, **common
        )

    def ranks(self):
        return [(stage, rank) for stage in range(len(self.cuts) - 1) for rank in range(self.tp)]


@st.composite
def models(draw, layers=40, heads=16, dim=8, kinds=("mha", "mha", "mla")):
    usual = [count for count in (1, 2, 4, 8, 12, 16) if count <= heads]
    return Model(
        draw(st.sampled_from(kinds)),
        draw(st.integers(1, layers)),
        draw(st.one_of(st.sampled_from(usual), st.integers(1, heads))),
        (draw(st.integers(1, dim)), draw(st.integers(1, dim))),
        draw(st.sampled_from(DTYPES)),
    )


@st.composite
def sides(draw, model, pp=4, tp=8, page=64):
    stages = draw(st.integers(1, min(pp, model.layers)))
    inner = st.sets(st.integers(1, max(1, model.layers - 1)), min_size=stages - 1)
    cuts = sorted(draw(inner))[: stages - 1]
    ranks = [t for t in range(1, tp + 1) if model.heads % t == 0 or t % model.heads == 0]
    return Side(
        (0, *cuts, model.layers),
        draw(st.sampled_from(ranks)),
        draw(st.integers(1, page)),
        draw(st.sampled_from(("nhd", "hnd"))),
        draw(st.sampled_from(("layer", "page"))),
    )


@st.composite
def geometries(draw, layers=40, heads=16, dim=8, pp=4, tp=8, page=64, **options):
    model = draw(models(layers, heads, dim, **options))
    source, dest = (draw(sides(model, pp, tp, page)) for _ in range(2))
    return model, source, dest, draw(st.sampled_from(dest.ranks()))


def pools_of(geometry, tokens):
    """Prefill's pools, and that of one decode rank."""
    model, source, dest, where = geometry
    pools = [source.pool(model, *rank, tokens) for rank in source.ranks()]
    return pools, dest.pool(model, *where, tokens)


@given(geometries(), st.integers(1, 300), st.data())
def test_any_geometry_is_byte_exact(geometry, tokens, data):
    prefix = data.draw(st.one_of(st.just(0), st.integers(0, tokens)), label="prefix")
    seed = data.draw(st.integers(0, 2**16), label="seed")
    hand_off(*pools_of(geometry, tokens), tokens, prefix=prefix, seed=seed)


@settings(max_examples=50)
@given(
    geometries(layers=3, heads=4, dim=3, pp=2, tp=4, page=9),
    st.integers(1, 40),
    st.sampled_from(("source", "destination")),
    st.data(),
)
def test_an_id_outside_its_buffer_is_refused(geometry, tokens, who, data):
    pools, into = pools_of(geometry, tokens)
    made = plan([pool.layout for pool in pools], into.layout)
    there, here = [place(pool, tokens) for pool in pools], place(into, tokens)
    items = into.num_pages if who == "destination" else pools[0].num_pages
    wrong = data.draw(st.sampled_from((0, items, items + 7, 2**40)), label="id")
    if who == "destination":
        here = _with_id(here, wrong, data)
    else:
        there = [_with_id(address, wrong, data) for address in there]
    with pytest.raises(ValueError, match=f"{who}: item {wrong} of space kv lies outside 1 to"):
        made.bind_all(there, here)


def _with_id(address, wrong, data):
    ids = address.spans["kv"].ids.copy()
    ids[data.draw(st.integers(0, ids.size - 1))] = wrong
    return RequestAddress(address.num_tokens, {"kv": Span(ids)})


@settings(max_examples=50)
@given(geometries(layers=3, heads=4, dim=3, pp=2, tp=4, page=9), st.integers(1, 40), st.data())
def test_a_position_that_the_source_lacks_is_refused(geometry, tokens, data):
    pools, into = pools_of(geometry, tokens)
    made = plan([pool.layout for pool in pools], into.layout)
    held = data.draw(st.integers(0, tokens - 1), label="held")
    there = [place(pool, held) for pool in pools]
    with pytest.raises(IncompleteTransfer, match=f"space kv holds positions up to {held - 1}"):
        made.bind_all(there, place(into, tokens))
    short = [RequestAddress(tokens, address.spans) for address in there]
    page = pools[0].page_size
    if -(-held // page) < -(-tokens // page):
        with pytest.raises(IncompleteTransfer, match="source: space kv needs items"):
            made.bind_all(short, place(into, tokens))


KINDS = {
    "mamba-1": (lambda order: mamba1(8, 5, 4, order), {}),
    "short conv": (lambda order: short_conv(8, 3, order), {}),
    "lightning": (lambda order: lightning(4, 6), {}),
    "mamba-2 and attention in a layer": (
        lambda order: mamba2(8, 3, 2, 5, 4, order),
        {"full_layers": range(4), "linear_layers": range(4)},
    ),
    "slots alone": (
        lambda order: mamba1(8, 5, 4, order),
        {"full": None, "linear_layers": range(4)},
    ),
}
ORDERS = ("channels_first", "taps_first")


def pools(kind: str, order: str, ranks: int, **more: object) -> list[HybridLinearPool]:
    """The ranks of an engine."""
    linear, given = KINDS[kind]
    common = {
        "layers": range(4), "full": MHA(4, 8), "linear_layers": [0, 2], "page_size": 4,
        "num_pages": 12, "num_slots": 5, "dtype": "bf16", "linear": linear(order),
    }  # fmt: skip
    arguments = {**common, **given, **more}
    return [HybridLinearPool(shard=Shard(rank, ranks), **arguments) for rank in range(ranks)]


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (2, 4)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_states_are_resharded(kind, order, prefill, decode):
    sources = pools(kind, order, prefill, placement="page" if prefill == 4 else "layer")
    for dest in pools(kind, ORDERS[prefill > 1], decode, page_size=8, num_pages=7):
        hand_off(sources, dest, 21)
