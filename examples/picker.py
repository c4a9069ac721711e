"""A router's picker: servers whose label `contract` is equal hand over to one another.

`python examples/picker.py http://HOST:9400 ...` asks the contract ports of running servers; without
any, three engines stand for them, two of which are of one model. What a pair hands over is planned.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Literal, TypeVar

from disagg.contract import Contract, ContractRank, ContractServer, Fit, labels, read_contract
from kvpool import MHAPool, Shard

Groups = dict[str, dict[str, list[str]]]
Request = TypeVar("Request")


def groups(sources: Iterable[str]) -> Groups:
    """Prefills and decodes by label; a server without a label fits nobody for certain."""
    sides: Groups = {}
    for source in sources:
        contract = read_contract(source)
        label = labels(contract).get("contract", source)
        for side in contract.serves:
            sides.setdefault(label, {"prefill": [], "decode": []})[side].append(source)
    return sides


def picks(sides: Groups, requests: Iterable[Request]) -> Iterator[tuple[Request, str, str]]:
    """A prefill and a decode for each request: the groups in turn, and in each its servers."""
    turns = [[cycle(side) for side in g.values()] for g in sides.values() if all(g.values())]
    for request, (prefills, decodes) in zip(requests, cycle(turns)):
        yield request, next(prefills), next(decodes)


def engine(
    serves: Literal["prefill", "decode"], theta: float, tp: int = 1, page: int = 16
) -> Contract:
    build = partial(MHAPool, layers=range(4), num_kv_heads=4, head_dim=8, dtype="bf16", num_pages=9)
    layouts = [build(page_size=page, shard=Shard(rank, tp)).layout for rank in range(tp)]
    conventions: dict[str, str | float] = {"model": "llama", "rope_theta": theta}
    ranks = tuple(ContractRank.of(n, layout, conventions) for n, layout in enumerate(layouts))
    return Contract(engine="local", serves=(serves,), size=tp, ranks=ranks, versions={})


def planned(prefill: str, decode: str) -> int:
    """Bytes that plans move of a request of 100 tokens."""
    sides = [read_contract(source) for source in (prefill, decode)]
    fit = Fit(prefill=sides[0], decode=sides[1], names=(prefill, decode), tokens=100)
    assert not fit.objections()
    return sum(fit.hand_off.received().values())


def main(*sources: str) -> None:
    engines = [engine("prefill", 1e4, tp=2), engine("decode", 1e4, page=64), engine("decode", 5e5)]
    with ExitStack() as stack:
        if not sources:
            servers = [stack.enter_context(ContractServer("127.0.0.1:*", one)) for one in engines]
            sources = tuple(f"http://{server.address}" for server in servers)
        sides = groups(sources)
        for label, side in sides.items():
            print(label, side)
        for request, prefill, decode in picks(sides, ["r1", "r2"]):
            nbytes = planned(prefill, decode)  # of 100 tokens; of engine() 512 each
            print(f"{request}: {prefill} prefills, {decode} decodes, {nbytes:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
