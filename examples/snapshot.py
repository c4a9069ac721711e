"""A request as files, loaded by ranks of another geometry.

Four ranks of tensor parallelism save what they hold, each its heads. Two ranks with other pages and
another order load it, and compare it with what was written.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from disagg.plan import IncompatibleLayouts
from disagg.snapshot import check, inspect, load, save
from kvpool import Allocator, MHAPool, Shard

build = partial(MHAPool, layers=range(4), num_kv_heads=8, head_dim=64, dtype="bf16")
TOKENS = 200


def save_ranks(folder: Path, written: torch.Tensor) -> list[Path]:
    """One file a rank; in an engine each rank is a process."""
    paths = []
    for rank in range(4):
        pool = build(num_pages=9, page_size=64, shard=Shard(rank, 4))
        allocator = Allocator(pool)
        request = allocator.new_request()
        where = allocator.extend(request, TOKENS)["kv"]
        for layer in range(4):
            k, v = written[:, layer, :, 2 * rank : 2 * rank + 2]
            pool.set_kv_buffer(layer, where, k, v)
        paths.append(folder / f"chat.{rank}.kv")
        save(paths[-1], pool.layout, request.address(), request="chat")
    return paths


def main() -> None:
    written = torch.randn(2, 4, TOKENS, 8, 64).bfloat16()  # [k and v, layer, token, head, dim]
    with TemporaryDirectory() as name:
        paths = save_ranks(Path(name), written)
        print(f"{inspect(paths[0]).tokens} tokens, {paths[0].stat().st_size:,} bytes a file")
        check(paths[0])  # reads all data, and compares their digests

        for rank in range(2):
            pool = build(num_pages=33, page_size=16, order="hnd", shard=Shard(rank, 2))
            allocator = Allocator(pool)
            request = allocator.new_request()
            allocator.extend(request, TOKENS, received=True)
            load(paths, pool.layout, request.address())
            where = allocator.locations(request)["kv"]
            for layer in range(4):
                k, v = pool.get_kv_buffer(layer, where)
                sent = written[:, layer, :, 4 * rank : 4 * rank + 4]
                assert torch.equal(k, sent[0]) and torch.equal(v, sent[1])
        print("both ranks hold what was written")

        try:
            load(paths[:1], pool.layout, request.address())
        except IncompatibleLayouts as refused:  # before a byte is written
            print(refused)


if __name__ == "__main__":
    main()
