"""Prefill and decode in two processes: decode pulls, in an asyncio loop that serves requests too.

Prefill sends each prompt in chunks while it computes the next one. Decode has other page sizes and
another order of heads and tokens. The process that starts the other one is prefill.
"""

import asyncio
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from disagg import DecodeEndpoint, Ended, KVPoll, PrefillEndpoint, create_engine
from kvpool import Allocator, MHAPool

build = partial(MHAPool, layers=range(4), num_kv_heads=2, head_dim=32, dtype="f32")
PROMPTS: dict[int | str, int] = {"r1": 100, "r2": 37, "r3": 250}  # rooms and tokens
CHUNK = 64


def computed(tokens: int) -> torch.Tensor:
    """Stands for a forward pass over a prompt: K and V, `[2, layer, token, head, dim]`."""
    return torch.randn(2, 4, tokens, 2, 32, generator=torch.Generator().manual_seed(tokens))


def decode(address: str, pipe: Connection) -> None:
    pool = build(num_pages=33, page_size=16, order="hnd")
    allocator = Allocator(pool)
    with DecodeEndpoint(pool.layout, create_engine("local")) as endpoint:
        endpoint.connect([address], timeout=60)  # plans, or refuses with all reasons
        asyncio.run(serve(endpoint, pool, allocator, pipe))


async def serve(
    endpoint: DecodeEndpoint, pool: MHAPool, allocator: Allocator, pipe: Connection
) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Queue[Ended]()

    def take() -> None:
        for room in endpoint.ended():
            ended.put_nowait(room)

    loop.add_reader(endpoint, take)  # readable while rooms have ended that nobody was told of
    requests = {room: allocator.new_request() for room in PROMPTS}
    for room, request in requests.items():
        allocator.extend(request, PROMPTS[room], received=True)
        endpoint.receive(room, request.address(), aux=("first_token",))
    for _ in requests:
        room, state, failure = await ended.get()
        assert state is KVPoll.Success, failure
        k, v = computed(PROMPTS[room])
        where = allocator.locations(requests[room])["kv"]
        for layer in range(4):
            keys, values = pool.get_kv_buffer(layer, where)
            assert torch.equal(keys, k[layer]) and torch.equal(values, v[layer])
        pipe.send((room, PROMPTS[room], endpoint.aux(room)["first_token"]))
        endpoint.forget(room)
    loop.remove_reader(endpoint)


def main() -> None:
    pool = build(num_pages=17, page_size=32)
    allocator, spawn = Allocator(pool), get_context("spawn")
    pipe, theirs = spawn.Pipe()
    with PrefillEndpoint(pool.layout, create_engine("local")) as endpoint:
        spawn.Process(target=decode, args=(endpoint.address, theirs), daemon=True).start()
        for room, tokens in PROMPTS.items():
            request, (k, v) = allocator.new_request(), computed(tokens)
            for start in range(0, tokens, CHUNK):
                part = slice(start, min(start + CHUNK, tokens))
                where = allocator.extend(request, part.stop - start)["kv"]
                for layer in range(4):
                    pool.set_kv_buffer(layer, where, k[layer, part], v[layer, part])
                last = part.stop == tokens
                aux = {"first_token": tokens} if last else None
                endpoint.send(room, request.address(), last=last, aux=aux)
        for _ in PROMPTS:
            print("room {}: {} tokens arrived as computed, first token {}".format(*pipe.recv()))
        assert all(endpoint.wait(room, timeout=10) is KVPoll.Success for room in PROMPTS)


if __name__ == "__main__":
    main()
