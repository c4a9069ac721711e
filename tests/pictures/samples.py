"""Pictures to look at: real layouts, a real hand-off, and ratios far below and above 1."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import get_args

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.cli.bench.case import COPY, Measurement
from disagg.cli.bench.report import BenchReport
from disagg.cli.compare import Alternatives
from disagg.cli.picture import page as explained
from disagg.cli.sides import AskedSide, RankSplit as Split
from disagg.cli.store.picture import page as store_page
from disagg.cli.wire import LinkRates
from disagg.contract.hand_off import HandOff
from disagg.protocol.metrics import RoomMetrics
from disagg.store.floors.base import Listed
from disagg.store.geometry import Geometry
from disagg.store.upkeep.inventory import Amount, Held, Inventory
from disagg.store.upkeep.tree import Chunk, linked
from disagg.testing.judge import Result, Verdict
from disagg.testing.report import ConformReport, TriedPair
from disagg.testing.suite import Pair, ServerSettings
from disagg.timeline import timeline
from kvpool import MHAPool, PoolLayout, Shard
from kvpool.cli.describe import model_layout
from kvpool.item import Cell, Repeat, Seq, Skip
from kvpool.layout.formats import MHA, gated_delta_net
from kvpool.render.chart import chart_html
from kvpool.render.html import html
from kvpool.render.svg import svg
from tests import oracle
from tests.kvpool.render.test_memory_map import layout_of
from tests.kvpool.render.test_svg import hybrid
from tests.pools import hybrid as small_hybrid, mha

TOKENS = 2000
RATIOS = {
    "store": [("K and V 8 x 128, NHD", 1.06), ("MLA fp8, 656 B", 0.27), ("DSv4 fp8, 584 B", 0.23)],
    "load": [("K and V 8 x 128, NHD", 0.74), ("MLA bf16, 1152 B", 1.04), ("DSv4 fp8, 584 B", 0.3)],
    "move": [("MLA by layer, device ids", 1.24), ("MLA by page, host ids", 0.92)],
    "gather": [("512 B", 0.88), ("36 KiB", 1.15)],
    "scatter": [("512 B", 1.0), ("36 KiB", 1.2)],
    "transfer": [
        ("local, 1 KiB", 0.71),
        ("mooncake, 1 KiB", 0.0015),
        ("mooncake, 4 KiB", 0.0084),
        ("nixl, 1 KiB", 0.025),
        ("nixl, one run", 0.31),
    ],
    "handoff": [
        ("nixl, MLA, 8,192 tokens in chunks of 2,048", 0.00012, "the bare engine"),
        ("local, MLA, 1 token", 12_345.0, "the bare engine"),
    ],
}


LONG_SENTENCE = (
    "IncompatibleLayouts: 1 reason.\n  target layer 61 index_key: prefill offers no such region "
    "(it holds layers 0-60). /proc/driver/nvidia/" + "a_very_long_name_without_spaces_" * 4
)


def handed_over(
    ranks: int = 2, chunk: int = 512, layers: int = 4, seconds: float = 0.002
) -> RoomMetrics:
    """A request that real endpoints hand over: from `ranks` of prefill to one of decode, in
    chunks, so many layers of a chunk at a time, each computed for some seconds.
    """
    sizes = {"num_kv_heads": 4, "head_dim": 8, "dtype": "bf16", "num_pages": 40, "page_size": 64}
    pools = [MHAPool(layers=range(4), shard=Shard(n, ranks), **sizes) for n in range(ranks)]
    dest = MHAPool(layers=range(4), **sizes)
    with ExitStack() as stack:
        sources = [
            stack.enter_context(PrefillEndpoint(pool.layout, create_engine("local")))
            for pool in pools
        ]
        decode = DecodeEndpoint(dest.layout, create_engine("local"), verify="checksum")
        stack.enter_context(decode)
        decode.connect([source.address for source in sources], timeout=30)
        decode.receive("r", oracle.place(dest, TOKENS))
        for start, low in product(range(0, TOKENS, chunk), range(0, 4, layers)):
            tokens = range(start, min(start + chunk, TOKENS))
            parts = {"layers": range(low, low + layers)} if layers < 4 else {}
            last = tokens.stop == TOKENS and low + layers == 4
            for pool, source in zip(pools, sources):
                source.send("r", oracle.place(pool, TOKENS), tokens=tokens, last=last, **parts)
            time.sleep(seconds)
        assert decode.wait("r", 30) is KVPoll.Success
        return decode.metrics("r")


def rooms() -> dict[str, RoomMetrics]:
    """Hand-offs of as many tokens."""
    return {
        "two ranks of prefill": handed_over(),
        "layer by layer": handed_over(1, layers=1),
        "a slow prefill": handed_over(1, seconds=0.5),
    }


def report() -> BenchReport:
    """Ratios as they are measured, some far below and far above 1, and a case that did not run."""
    rows = [measured(group, *case) for group, cases in RATIOS.items() for case in cases]
    lacking = case_of("transfer", "mori, 1 KiB")
    rows.append(replace(lacking, reason="engine 'mori': no AMD GPU. Run it on one."))
    machine = {"device": "cpu", "name": "a processor", "memory": "8 GiB"}
    date, versions = "2026-11-23T12:00:00", {"torch": "2.13.0"}
    return BenchReport(machine=machine, versions=versions, date=date, quick=False, rows=rows)


def case_of(group: str, name: str, bound: str = COPY) -> Measurement:
    """A case that did not run."""
    return Measurement(group=group, case=name, bytes=0, bound=bound)


def measured(group: str, name: str, ratio: float, bound: str = COPY) -> Measurement:
    """A case whose rounds took about a millisecond, those of transfers further apart."""
    source = random.Random(name)
    spread = 0.3 if group in ("transfer", "handoff") else 0.05
    rounds = [(1e-3 * source.lognormvariate(0.0, spread), ratio * 1e-3) for _ in range(20)]
    return case_of(group, name, bound).timed(rounds)


def conformed() -> ConformReport:
    """Rows of each result, with a long reason."""
    side = ServerSettings(
        engine="vllm",
        block_size=32,
        tp=2,
        pp=2,
        dtype="bfloat16",
        draft=None,
        method=None,
        args={"max_num_batched_tokens": 2048},
    )
    rows = [
        TriedPair(
            pair=Pair(
                name=f"row {number}",
                connector="kvpool",
                model="llama_shallow",
                prefill=side,
                decode=replace(side, engine="sglang", block_size=128),
                transport="mooncake",
                settings={"allow_missing": ["draft"]},
                prompts=(70, 200),
                new_tokens=16,
            ),
            digest=str(number),
            verdict=Verdict(result=result, reason=LONG_SENTENCE if number % 2 else "bytes"),
            versions={"vllm": "0.32.0", "mooncake-transfer-engine-non-cuda": "0.3.13"},
            date="2026-11-28T10:00:00+00:00",
            seconds=61.0,
        )
        for number, result in enumerate(get_args(Result))
    ]
    return ConformReport(suite="compatibility.toml", date=rows[0].date, complete=False, rows=rows)


def of_a_shard() -> PoolLayout:
    """Of a hybrid model with heads of usual sizes."""
    linear = gated_delta_net(16, 32, 128, 128, 4)
    return hybrid(MHA(8, 128), linear, shard=Shard(1, 4), num_pages=2).layout


def long_names() -> PoolLayout:
    """Regions with names as long as they may be for a reader, and an item of a gibibyte."""
    names = [f"{n}-{'state_of_a_kind_' * 4}" for n in range(5)]
    cells = Seq(*(Cell(name, 1 << 15 + n, "uint8") for n, name in enumerate(names)), Skip(100))
    return layout_of(Repeat("position_of_an_entry", 1 << 10, cells))


def model(name: str) -> PoolLayout:
    """What `kvpool describe` shows of a model."""
    return model_layout(name, {"--dtype": "fp8", "--draft": True})[0]


def handing_over(model: str, prefill: Split, decode: Split) -> str:
    """What `kvpool explain` draws of a model that is split and stored so on both sides, with
    the alternatives.
    """
    sides = AskedSide("prefill", (model,), prefill), AskedSide("decode", (model,), decode)
    hand_off = HandOff(prefill=sides[0].read(), decode=sides[1].read(), tokens=TOKENS)
    link = LinkRates(50e9, 5e6)
    return explained(hand_off, link, Alternatives.of(*sides, TOKENS, link))


def stored() -> str:
    """A page of a store: prompts that part again and again, some without their beginning, states at
    some ends, and conventions that are long.
    """
    source = random.Random(3)
    inventory, chunks = Inventory(), list[Chunk]()
    for model, pool in (("llama", mha(num_pages=9)), ("qwen_" * 9, small_hybrid(num_pages=9))):
        said = {
            "model": model,
            "quantization": "a_long_name_without_spaces_" * 3,
            "weights": "0f" * 32,
        }
        geometry = Geometry.of([pool.layout], said, 256)
        held = inventory.namespaces[model] = Held(f"{len(chunks):032x}", {0: geometry})
        for number in range(60):
            parents = [chunk for chunk in chunks if chunk.namespace == held.namespace]
            parent = source.choice(parents[-6:]) if parents and number % 17 else None
            chunk = Chunk(held.namespace, source.randbytes(32), used=1.8e9 + 3600 * number)
            chunk.number = (parent.number or 0) + 1 if parent else 3 * (number > 0)
            chunk.parent = parent.key if parent else source.randbytes(32)
            chunks.append(chunk)
            for kind in geometry.parts[0]:
                if kind != "state" or number % 3 == 0:
                    chunk.kinds.add(kind)
                    entry = Listed("", geometry.parts[0][kind].nbytes, chunk.used)
                    chunk.nbytes += entry.size
                    held.amounts.setdefault((geometry.digest, kind), Amount()).count_object(entry)
                    held.keys.add(chunk.key)
        held.amounts[bytes(16), "full"] = Amount(3, 1 << 14)
    lost = Chunk("", b"l" * 32)
    lost.why = f"{'0' * 64}.0.full: its head says b'0000', which is no object of a store."
    return store_page("file:///cache", inventory, linked([*chunks, lost]))


PICTURES: dict[str, Callable[[], str]] = {
    "map.html": lambda: html(model("deepseek_v4"), "deepseek_v4, fp8"),
    "map-long.html": lambda: html(long_names(), "Names " + "that are long " * 20),
    "map-long.svg": lambda: svg(long_names(), "Names " + "that are long " * 20),
    "map-states.html": lambda: html(of_a_shard(), "a hybrid model, rank 1 of 4"),
    "map-states.svg": lambda: svg(of_a_shard(), "a hybrid model, rank 1 of 4"),
    "bench.html": lambda: chart_html(report().chart(), report().header()),
    "explain.html": lambda: handing_over("gpt_oss_120b", Split(tp=4), Split(tp=2)),
    "explain-states.html": lambda: handing_over(
        "qwen3_next_80b", Split(tp=2, page_size=64), Split(tp=4, page_size=16)
    ),
    "conform.html": lambda: conformed().html(),
    "store.html": stored,
    "handoff.html": lambda: chart_html(timeline(rooms())),
}
"""By the name of the file."""
