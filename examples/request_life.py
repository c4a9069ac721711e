"""A pool in a budget, and the life of a request: it grows, forks, loses drafts, makes room.

Four layers of gpt-oss: two see all tokens, two a window of 128 tokens. Pages that a window has left
are freed. Each step compares what the request reads with what was written.
"""

import torch
from numpy import int64
from numpy.typing import NDArray

from kvpool import Allocator, KVPool, OutOfPages, Request
from kvpool.models import declare


def keys(tokens: list[int]) -> torch.Tensor:
    """Of a layer: K of each token is its number, `[token, head, dim]`."""
    return torch.tensor(tokens, dtype=torch.bfloat16)[:, None, None].expand(-1, 8, 64)


def write(pool: KVPool, where: dict[str, NDArray[int64]], tokens: list[int]) -> None:
    """Stands for a forward pass, of a layer of each kind."""
    for layer, role, space in ((0, "swa.k", "swa"), (1, "k", "kv")):
        pool.write(layer, where[space], {role: keys(tokens)})


def check(pool: KVPool, allocator: Allocator, request: Request, tokens: list[int]) -> None:
    """What the request reads is `tokens`, of the window those that are alive."""
    assert request.num_tokens == len(tokens)
    where = allocator.locations(request)
    for layer, role, space, alive in ((0, "swa.k", "swa", 127), (1, "k", "kv", len(tokens))):
        assert torch.equal(pool.read(role, layer, where[space][-alive:]), keys(tokens[-alive:]))


def main() -> None:
    declared = declare("gpt_oss_120b")  # or a config.json, or its folder
    pool = declared.from_budget(16 << 20, requests=4, layers=range(4), dtype="bf16", page_size=16)
    allocator = Allocator(pool)
    print(f"{pool.num_pages} pages of {pool.page_size} tokens, {pool.bytes_per_token:,} bytes each")

    prompt = list(range(200))
    request = allocator.new_request()
    write(pool, allocator.extend(request, 200), prompt)  # flat locations, int64 [200], by space
    check(pool, allocator, request, prompt)

    fork = allocator.fork(request, 200)  # whole pages are shared, the last one is copied
    ids = [set(each.address().spans["kv"].ids.tolist()) for each in (request, fork)]
    print(f"the fork shares {len(ids[0] & ids[1])} of {len(ids[0])} pages")

    write(pool, allocator.extend(request, 4), [7, 8, 9, 10])  # a token and three drafts
    allocator.truncate(request, 202)  # one draft is accepted
    check(pool, allocator, request, [*prompt, 7, 8])
    check(pool, allocator, fork, prompt)

    others = []
    try:
        while True:  # until nothing is left; a request that got nothing has changed nothing
            others.append(allocator.new_request())
            allocator.extend(others[-1], 200)
    except OutOfPages as full:
        print(full)
    saved = pool.save(request.address())  # to host memory: pages, windows, slots, rings
    allocator.free(request)
    for other in others:
        allocator.free(other)

    again = allocator.new_request()
    allocator.extend(again, saved.num_tokens, received=True)
    pool.load(again.address(), saved)
    check(pool, allocator, again, [*prompt, 7, 8])
    print(f"{again.num_tokens} tokens came back as they were written")
    for each in (again, fork):
        allocator.free(each)
    allocator.check_integrity()
    print(f"every page is free again: {allocator.usage().used}")


if __name__ == "__main__":
    main()
