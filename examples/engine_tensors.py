"""Tensors that an engine owns, described and not copied, planned into memory of another form.

Prefill: two ranks of tensor parallelism, each with K and V of all layers in one tensor, in pages of
32 tokens. Decode: one rank, K and V in tensors of their own, heads before tokens, pages of 16.
No pool and no endpoint: a plan gives pointers and lengths, and what copies is up to the engine.
"""

import ctypes

import torch

from disagg.plan import plan
from kvpool import PoolLayout, RequestAddress, Space, Span
from kvpool.describe import describe

LAYERS, HEADS, DIM, TOKENS = 4, 8, 64, 100


def prefill_layout(rank: int, cache: torch.Tensor) -> PoolLayout:
    """`cache` is `[k and v, layer, page, token, head, dim]`; half of the heads are here."""
    described = describe(
        cache,
        ("role", "layer", "item", "entry", "head", "dim"),
        role=("k", "v"),
        layer=range(LAYERS),
        shards={"head": (rank * HEADS // 2, HEADS)},
    )
    return PoolLayout.of(described, spaces=[Space("kv", entries_per_item=32)])


def decode_layout(keys: list[torch.Tensor], values: list[torch.Tensor]) -> PoolLayout:
    """A list of tensors for K and one for V, each `[page, head, token, dim]`."""
    parts = [
        describe(tensor, ("item", "head", "entry", "dim"), role=role, layer=layer)
        for role, tensors in (("k", keys), ("v", values))
        for layer, tensor in enumerate(tensors)
    ]
    return PoolLayout.of(*parts, spaces=[Space("kv", entries_per_item=16)])


def main() -> None:
    caches = [torch.randn(2, LAYERS, 9, 32, HEADS // 2, DIM) for _ in range(2)]
    keys, values = ([torch.zeros(17, HEADS, 16, DIM) for _ in range(LAYERS)] for _ in range(2))
    sources = [prefill_layout(rank, cache) for rank, cache in enumerate(caches)]
    transfer = plan(sources, decode_layout(keys, values))
    print(transfer.explain(tokens=TOKENS))

    there = RequestAddress(TOKENS, {"kv": Span([3, 1, 4, 2])})  # the same pages on both ranks
    here = RequestAddress(TOKENS, {"kv": Span([9, 4, 3, 16, 7, 6, 1])})
    for batch in transfer.bind_all([there, there], here):
        for dst, src, nbytes in zip(*(x.tolist() for x in (batch.dst, batch.src, batch.nbytes))):
            ctypes.memmove(dst, src, nbytes)  # one host; elsewhere: the engine's own reads

    for token in range(TOKENS):
        page, entry = there.spans["kv"].ids[token // 32], token % 32
        sent = torch.cat([cache[:, :, page, entry] for cache in caches], dim=2)  # [2, L, H, D]
        page, entry = here.spans["kv"].ids[token // 16], token % 16
        for layer in range(LAYERS):
            assert torch.equal(keys[layer][page, :, entry], sent[0, layer])
            assert torch.equal(values[layer][page, :, entry], sent[1, layer])
    print(f"{TOKENS} tokens of {LAYERS} layers are equal")


if __name__ == "__main__":
    main()
