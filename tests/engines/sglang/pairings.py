"""Pairs of SGLang's pools: the rows of docs/sglang-pools.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.engines.sglang import sides
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import PAGES, request

TOKENS, WINDOW = 150, 40
RATIOS = [0, 4, 128, 4, 128, 0]


class Pair(NamedTuple):
    """Two sides of a hand-over: the class, what differs, and what is passed to either."""

    pool: str
    differs: str
    make: Callable[[], tuple[list[Side], list[Side]]]
    layers: int = 4
    heads: int = 4
    missing: tuple[str, ...] = ()


def side(pool, seed, tokens=TOKENS, pages=PAGES, **more) -> Side:
    place = {name: more.pop(name) for name in ("first", "row") if name in more}
    ask = request(pool.page_size, tokens, seed, pages, slot=seed % 5 + 1, **place)
    return Side(pool, ask, **more)


def shards(make, count, seed, **more) -> list[Side]:
    return [side(make(count), seed + n, rank=n, ranks=count, **more) for n in range(count)]


def both(make, **more) -> tuple[list[Side], list[Side]]:
    return [side(make(), 1, **more)], [side(make(), 2, **more)]


def tp(make, there, here, **more):
    return lambda: (shards(make, there, 1, **more), shards(make, here, 11, **more))


def pp(make, draft=None):
    """Two stages to one; `draft`: on both sides, with the last stage."""

    def made():
        stages = [side(make(layers=2, start=2 * n), n + 1) for n in range(2)]
        whole = side(make(), 9)
        if draft is not None:
            stages[1] = stages[1]._replace(draft=draft())
            whole = whole._replace(draft=draft())
        return stages, [whole]

    return made


def on_decode(make, draft):
    return lambda: ([side(make(), 1)], [side(make(), 2)._replace(draft=draft())])


def windows(there, here):
    """`there`, `here`: how many pages before the window each side lists."""

    def made():
        first = (TOKENS - WINDOW) // 16
        return tuple(
            [side(sides.swa(), n, first=first - more, window=WINDOW)]
            for n, more in enumerate((there, here), 1)
        )

    return made


def rings(there, here, tokens):
    def made():
        return tuple(
            [side(sides.dsv4(RATIOS, drafts=drafts), n, tokens, 8, row=n)]
            for n, drafts in enumerate((there, here), 1)
        )

    return made


def stages_of_v4():
    cut = [(0, 2), (2, 6)]
    stages = [side(sides.dsv4(RATIOS, start=a, end=b), a + 1, 300, 8, row=2) for a, b in cut]
    return stages, [side(sides.dsv4(RATIOS), 9, 300, 8, row=3)]


def replicas(there, here):
    def make(count):
        pool = sides.mha(heads=max(1, 2 // count))
        pool.total_heads = 2
        return pool

    return tp(make, there, here)


def pages(make):
    return lambda: ([side(make(16), 1)], [side(make(32), 2)])


def heads_of(make):
    """`make` for ranks that share 4 heads."""
    return lambda ranks: make(heads=4 // ranks)


def gdn(ranks):
    return sides.hybrid(heads=4 // ranks, ranks=ranks)


def gdn_dsa(ranks=1):
    return sides.hybrid(64, ranks=ranks, full="dsa")


def kda_mla(ranks):
    return sides.hybrid(ranks=ranks, kind="kda", full="mla")


swa_mxfp8 = partial(sides.swa, inner="MHATokenToKVPoolMXFP8")
one_draft, one_dsa = partial(sides.mha, layers=1), partial(sides.dsa, layers=1)


def drafts_of_dsa():
    return tuple([rank._replace(draft=one_dsa()) for rank in ranks] for ranks in both(sides.dsa))


MHA, MLA, DSA, V4 = (f"{name}TokenToKVPool" for name in ("MHA", "MLA", "DSA", "DeepSeekV4"))
MXFP8, SWA, GDN = "MHATokenToKVPoolMXFP8", "SWAKVPool", "HybridLinearKVPool"
SWA8 = "SWAKVPool of MXFP8"
DRAFT = {"missing": ("draft",)}
PAIRS = (
    Pair(MHA, "nothing", lambda: both(sides.mha)),
    Pair(MHA, "K and V of other sizes", lambda: both(lambda: sides.mha(v_head_dim=16))),
    Pair(MHA, "page size 16 and 32", pages(sides.mha)),
    Pair(MHA, "PP 2 to 1", pp(sides.mha)),
    Pair(MHA, "TP 2 to 1", tp(heads_of(sides.mha), 2, 1)),
    Pair(MHA, "TP 1 to 2", tp(heads_of(sides.mha), 1, 2)),
    Pair(MHA, "TP 4 to 1, 2 heads", replicas(4, 1), heads=2),
    Pair(MHA, "TP 1 to 4, 2 heads", replicas(1, 4), heads=2),
    Pair(MHA, "a draft on decode only", on_decode(sides.mha, one_draft), **DRAFT),
    Pair(MHA, "a draft of 4 layers on decode only", on_decode(sides.mha, sides.mha), **DRAFT),
    Pair(MHA, "PP 2 to 1, a draft on both", pp(sides.mha, one_draft)),
    Pair(MXFP8, "nothing", lambda: both(sides.mxfp8)),
    Pair(MXFP8, "PP 2 to 1", pp(sides.mxfp8)),
    Pair(MXFP8, "TP 2 to 1", tp(heads_of(sides.mxfp8), 2, 1)),
    Pair(MLA, "page size 16 and 32", pages(sides.mla)),
    Pair(MLA, "PP 2 to 1", pp(sides.mla)),
    Pair(MLA, "TP 2 to 1", tp(lambda ranks: sides.mla(), 2, 1)),
    Pair(DSA, "nothing", lambda: both(sides.dsa)),
    Pair(DSA, "PP 2 to 1", pp(sides.dsa)),
    Pair(DSA, "a draft on both", drafts_of_dsa),
    Pair(DSA, "PP 2 to 1, a draft on both (seed 1)", pp(sides.dsa, one_dsa)),
    Pair(DSA, "a draft on decode only", on_decode(sides.dsa, one_dsa), **DRAFT),
    Pair(SWA, "nothing", windows(0, 0)),
    Pair(SWA, "prefill lists a page more (seed 5)", windows(1, 0)),
    Pair(SWA, "decode lists a page more (seed 5)", windows(0, 1)),
    Pair(SWA, "TP 2 to 1", tp(heads_of(sides.swa), 2, 1, window=WINDOW)),
    Pair(SWA8, "nothing (seed 3)", lambda: both(swa_mxfp8, window=WINDOW)),
    Pair(SWA8, "TP 2 to 1", tp(heads_of(swa_mxfp8), 2, 1, window=WINDOW)),
    Pair(f"{GDN}, GDN", "nothing", lambda: both(sides.hybrid), 8),
    Pair(f"{GDN}, GDN", "TP 2 to 1", tp(gdn, 2, 1), 8),
    Pair(f"{GDN}, GDN", "TP 1 to 2", tp(gdn, 1, 2), 8),
    Pair(f"{GDN}, KDA and MLA", "TP 1 to 2", tp(kda_mla, 1, 2), 8),
    Pair(f"{GDN}, GDN and DSA", "nothing (seed 3)", lambda: both(gdn_dsa), 8),
    Pair(f"{GDN}, GDN and DSA", "TP 2 to 1", tp(gdn_dsa, 2, 1), 8),
    Pair(V4, "nothing", rings(0, 0, 300), 6),
    Pair(V4, "rings of 8 and 16 (seed 2), 300 tokens", rings(0, 3, 300), 6),
    Pair(V4, "rings of 8 and 16 (seed 2), 13 tokens", rings(0, 3, 13), 6),
    Pair(V4, "PP 2 to 1", stages_of_v4, 6),
)
