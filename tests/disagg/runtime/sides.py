"""One prefill and one decode in this process, each with a pool and a request."""

from __future__ import annotations

from contextlib import contextmanager

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from kvpool import MLAPool
from tests import oracle

TOKENS = 75
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 12, "page_size": 16}


def pool(**more):
    return MLAPool(layers=range(2), **{**MLA, **more})


@contextmanager
def prefill_side(bind=None, salt=0, **options):
    """A prefill in this process that has computed one request."""
    source = pool()
    address = oracle.place(source, TOKENS)
    oracle.write(source, address, range(TOKENS), salt)
    with PrefillEndpoint(source.layout, create_engine("local"), bind, **options) as endpoint:
        yield endpoint, address


@contextmanager
def decode_side(**options):
    dest = pool(page_size=8, num_pages=40)
    oracle.blank(dest)
    with DecodeEndpoint(dest.layout, create_engine("local"), **options) as endpoint:
        yield endpoint, dest, oracle.place(dest, TOKENS, 9)
