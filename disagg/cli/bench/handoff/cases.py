"""The cases of hand-offs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.handoff.request import FAMILIES, chunk_bytes, pool_of
from disagg.cli.bench.work import Work

BARE = "the bare engine"


def handoff_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """From the offer of a request's last chunk to Success on decode, in another process, for each
    family; the reference reads that chunk's runs. Bytes are those of that chunk's state.
    """
    for engine in engines:
        for family in FAMILIES:
            layout = pool_of(family, max(sizes.handoff_tokens), "meta").layout
            for tokens in sizes.handoff_tokens:
                for chunk in sorted({tokens, min(tokens, sizes.handoff_chunk)}, reverse=True):
                    name = f"{engine}, {family}, {tokens:,} token{'s' * (tokens > 1)}"
                    if chunk < tokens:
                        name += f" in chunks of {chunk:,}"
                    last = range((tokens - 1) // chunk * chunk, tokens)
                    yield BenchCase(
                        group="handoff",
                        name=name,
                        nbytes=chunk_bytes(layout, last),
                        open=partial(open_handoff, engine, family, tokens, chunk),
                        bound=BARE,
                        calls=1,
                        engine=engine,
                    )


def open_handoff(engine: str, family: str, tokens: int, chunk: int, context: BenchContext) -> Work:
    """See handoff_cases."""
    return context.handoffs(engine, family).work(tokens, chunk)
