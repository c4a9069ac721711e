"""A router's picker: servers whose label `contract` is equal hand over to one another.

`python examples/picker.py http://HOST:9400 ...` asks the contract ports of running servers; without
any, three engines stand for them, two of which are of one model.
"""

import sys
from contextlib import ExitStack
from itertools import cycle

from disagg.contract import Contract, ContractRank, ContractServer, labels, read_contract
from kvpool import MHAPool, Shard


def groups(sources):
    """Prefills and decodes by label; a server without a label fits nobody for certain."""
    sides = {}
    for source in sources:
        contract = read_contract(source)
        label = labels(contract).get("contract", source)
        for side in contract.serves:
            sides.setdefault(label, {"prefill": [], "decode": []})[side].append(source)
    return sides


def picks(sides, requests):
    """A prefill and a decode for each request: the groups in turn, and in each its servers."""
    turns = [[cycle(side) for side in g.values()] for g in sides.values() if all(g.values())]
    for request, (prefills, decodes) in zip(requests, cycle(turns)):
        yield request, next(prefills), next(decodes)


def engine(serves, theta, tp=1, page=16):
    sizes = {"layers": range(4), "num_kv_heads": 4, "head_dim": 8, "num_pages": 9, "dtype": "bf16"}
    pools = [MHAPool(**sizes, page_size=page, shard=Shard(rank, tp)) for rank in range(tp)]
    said = {"model": "llama", "rope_theta": theta}
    ranks = tuple(ContractRank.of(n, pool.layout, said) for n, pool in enumerate(pools))
    return Contract(engine="local", serves=(serves,), size=tp, ranks=ranks, versions={})


def main(*sources):
    engines = [engine("prefill", 1e4, tp=2), engine("decode", 1e4, page=64), engine("decode", 5e5)]
    with ExitStack() as stack:
        if not sources:
            servers = [stack.enter_context(ContractServer("127.0.0.1:*", one)) for one in engines]
            sources = [f"http://{server.address}" for server in servers]
        sides = groups(sources)
        for label, side in sides.items():
            print(label, side)
        for request, prefill, decode in picks(sides, ["r1", "r2"]):
            print(f"{request}: {prefill} prefills, {decode} decodes")


if __name__ == "__main__":
    main(*sys.argv[1:])
