"""What objects print: one line each, with the numbers that tell them apart."""

from __future__ import annotations

from html.parser import HTMLParser

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.plan import plan
from kvpool import Allocator, MHAPool, PoolLayout, RequestAddress, Shard, Span
from kvpool.models import declare

MODEL = {"layers": range(4), "num_kv_heads": 8, "head_dim": 64, "dtype": "f32"}
WORDS = "layers 0-3, 17 pages of 16 entries, float32, head 4-7 of 8, 2.1 MiB on cpu"


def pool_of(**more):
    return MHAPool(**{**MODEL, "num_pages": 17, "page_size": 16, "shard": Shard(1, 2), **more})


def test_a_pool_and_its_layout_say_layers_items_type_shard_and_bytes():
    pool = pool_of(model="mine")
    assert repr(pool) == f"MHAPool(mine, {WORDS})"
    assert repr(pool.layout) == f"PoolLayout(mine, {WORDS})"
    fp8 = pool_of(packing="fp8", dtype=None, shard=Shard(), layers=[0, 2, 3], total_kv_layers=4)
    assert repr(fp8).startswith("MHAPool(layers 0, 2-3, 17 pages of 16 entries, float8_e4m3fn, ")


def test_several_spaces_and_owners_are_named():
    hybrid = declare("deepseek_v4").from_budget(2 << 30, requests=2, device="meta", dtype="bf16")
    assert " pages of swa of 128 entries, " in repr(hybrid) and " slots of ring, " in repr(hybrid)
    target, draft = pool_of(), pool_of(owner="draft", layers=[0], total_kv_layers=4)
    both = PoolLayout.merge(target.layout, draft.layout)
    assert "layers 0-3, draft layers 0, 17 pages of 16 entries" in repr(both)


def test_an_allocator_and_its_requests_say_what_they_use():
    pool = pool_of()
    allocator = Allocator(pool)
    request = allocator.new_request()
    allocator.extend(request, 100)
    assert repr(allocator) == "Allocator(1 request, 7 of 16 items of kv in use)"
    assert repr(request) == "Request(100 tokens, 7 items of kv)"
    allocator.free(request)
    assert repr(request) == "Request(freed)"
    address = RequestAddress(1000, {"kv": Span(range(1, 64))})
    assert repr(address) == "RequestAddress(1,000 tokens, 63 items of kv)"


def test_plans_and_endpoints_say_between_what_they_move():
    layout = pool_of().layout
    planned = plan([layout], layout)
    words = "1 source rank, target layers 0-3, 2 routes"
    assert repr(planned) == f"TransferPlan({words})"
    with (
        PrefillEndpoint(layout, create_engine("local")) as prefill,
        DecodeEndpoint(layout, create_engine("local")) as decode,
    ):
        where = prefill.address
        assert repr(prefill) == f"PrefillEndpoint({where}, engine local, 0 open rooms, {WORDS})"
        assert repr(decode) == f"DecodeEndpoint(engine local, 0 open rooms, {WORDS})"
        decode.connect([where], timeout=30)
        decode.receive("r", RequestAddress(16, {"kv": Span([1])}))
        assert "1 open room, " in repr(decode)
    assert repr(decode) == "DecodeEndpoint(closed)"


def test_a_layout_explains_each_shape_in_a_line():
    """Sizes from the shapes: 16 tokens of 4 heads of 64 float32."""
    head, *lines = pool_of().layout.explain().splitlines()
    assert head.split() == ["region", "layers", "dtype", "items", "item", "cell", "axes"]
    assert [line.split()[:7] for line in lines] == [
        ["target", role, "0-3", "float32", "17", "16,384", "256"] for role in "kv"
    ]
    assert lines[0].endswith("entry 16 x 1,024, head 4-7 of 8 x 256")


class Cells(HTMLParser):
    """The text of each cell, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, _):
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows:
            self.rows[-1].append(data)


def test_notebooks_show_layouts_and_plans_as_tables():
    pool = pool_of(model="<b>")
    text = pool._repr_html_()
    assert text == pool.layout._repr_html_() and "<b>" not in text
    lines = pool.layout.explain().splitlines()
    assert [row[:5] for row in Cells(text).rows[1:]] == [
        [f"target {role}", "0-3", "float32", "17", "16,384"] for role in "kv"
    ]
    assert len(Cells(text).rows) == len(lines)
    planned = plan([pool.layout], pool_of(page_size=32, num_pages=9).layout)
    head, *rows, total = Cells(planned._repr_html_()).rows
    assert head[:3] == ["roles", "layers", "runs"]
    assert [row[:2] for row in rows] == [["target k", "0-3"], ["target v", "0-3"]]
    totals = [sum(int(row[at].replace(",", "")) for row in rows) for at in (2, 3)]
    assert total[0] == "all" and [f"{n:,}" for n in totals] == total[1:3]
