"""Endpoints without threads, turned by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from disagg import DecodeEndpoint, KVPoll, Link, PrefillEndpoint, create_engine
from kvpool import MLAPool

MANY = 1_000_000
"""Steps in which anything has happened that will."""
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_pages": 12, "page_size": 16, "dtype": "bf16"}


class Clock:
    """Time that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An engine's loop over one prefill and some decodes, and the pools that they serve."""

    def __init__(self, decodes: list[DecodeEndpoint], prefill: PrefillEndpoint, clock: Clock):
        self.decodes, self.prefill, self.clock = decodes, prefill, clock
        self.decode = decodes[0]
        self.links: list[Link] = []

    @property
    def all(self) -> list[Any]:
        return [self.prefill, *self.decodes]

    def connect(self) -> None:
        self.links = [decode.connect([self.prefill.address]) for decode in self.decodes]
        self.step_until(lambda: all(link.settled for link in self.links))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for endpoint in self.all:
                endpoint.step()

    def step_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(MANY):
            if holds():
                return
            self.step()
        raise AssertionError(f"not within {MANY} steps")

    def step_until_ended(self, room: Any, *endpoints: Any) -> list[KVPoll]:
        some = endpoints or self.all
        self.step_until(lambda: all(each.poll(room).ended for each in some))
        return [each.poll(room) for each in some]


@contextmanager
def stepped(
    source: Any = None, dest: Any = None, *, ranks: int = 1, connected: bool = True, **options: Any
) -> Iterator[Engine]:
    """A prefill and `ranks` decodes over `local` and a unix socket; `options` of the decodes begin
    with `decode_`, of the prefill with `prefill_`.
    """
    clock = Clock()
    common = {"threaded": False, "clock": clock}
    given: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}
    for name, value in options.items():
        side, _, option = name.partition("_")
        given[side][option] = value
    pools = [each or MLAPool(layers=range(2), **MLA) for each in (source, dest)]
    layouts = [each.layout for each in pools]
    with ExitStack() as stack:
        made = create_engine("local")
        prefill = stack.enter_context(
            PrefillEndpoint(layouts[0], made, **common, **given["prefill"])
        )
        decodes = [
            stack.enter_context(
                DecodeEndpoint(layouts[1], each, ranks=ranks, **common, **given["decode"])
            )
            for each in [given["decode"].pop("engine", None) or create_engine("local")]
            + [create_engine("local") for _ in range(ranks - 1)]
        ]
        engine = Engine(decodes, prefill, clock)
        engine.pools = pools  # memory that peers read must outlive the endpoints
        if connected:
            engine.connect()
        yield engine
