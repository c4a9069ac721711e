"""Prints the table of docs/sglang-pools.md: pairs of SGLang's pools, what kvpool makes of them, and
what SGLang's own backends do.

PYTHONPATH=$PWD:tests/engines/sglang/stubs python -m tests.engines.sglang.pairings
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from disagg import IncompatibleLayouts
from tests.engines.sglang import sides, transports
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import PAGES, hand_over, request

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


ONE_DRAFT = {"layers": 1}
PAIRS = (
    Pair("MHATokenToKVPool", "nothing", lambda: both(sides.mha)),
    Pair(
        "MHATokenToKVPool", "K and V of other sizes", lambda: both(lambda: sides.mha(v_head_dim=16))
    ),
    Pair("MHATokenToKVPool", "page size 16 and 32", pages(sides.mha)),
    Pair("MHATokenToKVPool", "PP 2 to 1", pp(sides.mha)),
    Pair("MHATokenToKVPool", "TP 2 to 1", tp(lambda n: sides.mha(heads=4 // n), 2, 1)),
    Pair("MHATokenToKVPool", "TP 1 to 2", tp(lambda n: sides.mha(heads=4 // n), 1, 2)),
    Pair("MHATokenToKVPool", "TP 4 to 1, 2 heads", replicas(4, 1), heads=2),
    Pair("MHATokenToKVPool", "TP 1 to 4, 2 heads", replicas(1, 4), heads=2),
    Pair(
        "MHATokenToKVPool",
        "a draft on decode only",
        on_decode(sides.mha, lambda: sides.mha(**ONE_DRAFT)),
        missing=("draft",),
    ),
    Pair(
        "MHATokenToKVPool",
        "a draft of 4 layers on decode only",
        on_decode(sides.mha, sides.mha),
        missing=("draft",),
    ),
    Pair(
        "MHATokenToKVPool",
        "PP 2 to 1, a draft on both",
        pp(sides.mha, lambda: sides.mha(**ONE_DRAFT)),
    ),
    Pair("MHATokenToKVPoolMXFP8", "nothing", lambda: both(sides.mxfp8)),
    Pair("MHATokenToKVPoolMXFP8", "PP 2 to 1", pp(sides.mxfp8)),
    Pair("MHATokenToKVPoolMXFP8", "TP 2 to 1", tp(lambda n: sides.mxfp8(heads=4 // n), 2, 1)),
    Pair("MLATokenToKVPool", "page size 16 and 32", pages(sides.mla)),
    Pair("MLATokenToKVPool", "PP 2 to 1", pp(sides.mla)),
    Pair("MLATokenToKVPool", "TP 2 to 1", tp(lambda n: sides.mla(), 2, 1)),
    Pair("DSATokenToKVPool", "nothing", lambda: both(sides.dsa)),
    Pair("DSATokenToKVPool", "PP 2 to 1", pp(sides.dsa)),
    Pair(
        "DSATokenToKVPool",
        "a draft on both",
        lambda: tuple(
            [s._replace(draft=sides.dsa(**ONE_DRAFT)) for s in each] for each in both(sides.dsa)
        ),
    ),
    Pair(
        "DSATokenToKVPool",
        "PP 2 to 1, a draft on both (seed 1)",
        pp(sides.dsa, lambda: sides.dsa(**ONE_DRAFT)),
    ),
    Pair(
        "DSATokenToKVPool",
        "a draft on decode only",
        on_decode(sides.dsa, lambda: sides.dsa(**ONE_DRAFT)),
        missing=("draft",),
    ),
    Pair("SWAKVPool", "nothing", windows(0, 0)),
    Pair("SWAKVPool", "prefill lists a page more (seed 5)", windows(1, 0)),
    Pair("SWAKVPool", "decode lists a page more (seed 5)", windows(0, 1)),
    Pair("SWAKVPool", "TP 2 to 1", tp(lambda n: sides.swa(heads=4 // n), 2, 1, window=WINDOW)),
    Pair(
        "SWAKVPool of MXFP8",
        "nothing (seed 3)",
        lambda: both(lambda: sides.swa(inner="MHATokenToKVPoolMXFP8"), window=WINDOW),
    ),
    Pair(
        "SWAKVPool of MXFP8",
        "TP 2 to 1",
        tp(lambda n: sides.swa(heads=4 // n, inner="MHATokenToKVPoolMXFP8"), 2, 1, window=WINDOW),
    ),
    Pair("HybridLinearKVPool, GDN", "nothing", lambda: both(sides.hybrid), 8),
    Pair(
        "HybridLinearKVPool, GDN",
        "TP 2 to 1",
        tp(lambda n: sides.hybrid(heads=4 // n, ranks=n), 2, 1),
        8,
    ),
    Pair(
        "HybridLinearKVPool, GDN",
        "TP 1 to 2",
        tp(lambda n: sides.hybrid(heads=4 // n, ranks=n), 1, 2),
        8,
    ),
    Pair(
        "HybridLinearKVPool, KDA and MLA",
        "TP 1 to 2",
        tp(lambda n: sides.hybrid(ranks=n, kind="kda", full="mla"), 1, 2),
        8,
    ),
    Pair(
        "HybridLinearKVPool, GDN and DSA",
        "nothing (seed 3)",
        lambda: both(lambda: sides.hybrid(64, full="dsa")),
        8,
    ),
    Pair(
        "HybridLinearKVPool, GDN and DSA",
        "TP 2 to 1",
        tp(lambda n: sides.hybrid(64, ranks=n, full="dsa"), 2, 1),
        8,
    ),
    Pair("DeepSeekV4TokenToKVPool", "nothing", rings(0, 0, 300), 6),
    Pair("DeepSeekV4TokenToKVPool", "rings of 8 and 16 (seed 2), 300 tokens", rings(0, 3, 300), 6),
    Pair("DeepSeekV4TokenToKVPool", "rings of 8 and 16 (seed 2), 13 tokens", rings(0, 3, 13), 6),
    Pair("DeepSeekV4TokenToKVPool", "PP 2 to 1", stages_of_v4, 6),
)


def kvpool(pair: Pair) -> str:
    """What kvpool's endpoints make of a pair."""
    try:
        hand_over(*pair.make(), layers=pair.layers, heads=pair.heads, allow_missing=pair.missing)
    except IncompatibleLayouts as error:
        return f"refused: {' '.join(str(error).split())}"
    return "same"


def answers(pair: Pair) -> Iterator[str]:
    """kvpool's, Mooncake's and NIXL's."""
    yield kvpool(pair)
    for name in ("mooncake", "nixl"):
        yield transports.transfer(
            name, *pair.make(), layers=pair.layers, heads=pair.heads, missing=pair.missing
        )


def short(answer: str, most: int = 160) -> str:
    return (answer if len(answer) <= most else answer[: most - 3] + "...").replace("|", "/")


def table(pairs: Sequence[Pair] = PAIRS) -> Iterator[str]:
    yield "| pool | what differs | kvpool | SGLang, Mooncake | SGLang, NIXL |"
    yield "|---|---|---|---|---|"
    for pair in pairs:
        yield f"| {pair.pool} | {pair.differs} | {' | '.join(map(short, answers(pair)))} |"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    chosen = [pair for pair in PAIRS if all(word in str(pair[:2]) for word in sys.argv[1:])]
    with sides.alone():
        for line in table(chosen):
            print(line, flush=True)
