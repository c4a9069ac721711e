"""Prefill in other processes that live as long as the tests do: one for each engine.

A case opens endpoints over new pools there, offers what the oracle says they hold, and closes them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.processes import Child

PATIENCE = 60  # seconds after which a process that does not answer is stuck


@contextmanager
def offered(engine: str, ranks: Sequence[Sequence[Any]], tokens: int) -> Iterator[Any]:
    """Endpoints over the pools of each rank, a target's and its drafts', for `tokens` tokens.

    Yields their addresses and what can be called: `send(room, positions, aux, layers)` writes
    positions, of all layers or of some in ascending order, just before it offers them, so that
    bytes that are read too early are wrong.
    """
    from disagg import PrefillEndpoint
    from disagg.engines.base import create_engine
    from kvpool import RequestAddress
    from tests import oracle

    with ExitStack() as stack:
        held = []
        for seed, builds in enumerate(ranks, 1):
            holder = oracle.merged(*(build() for build in builds))
            oracle.blank(holder, oracle.SOURCE)
            endpoint = PrefillEndpoint(holder.layout, create_engine(engine))
            held.append((holder, oracle.place(holder, tokens, seed), stack.enter_context(endpoint)))

        def send(room, positions, aux=None, layers=None):
            last = positions.stop == tokens
            for holder, address, endpoint in held:
                own = {region.layer for region in holder.layout.regions}
                if layers is not None and not own.intersection(layers):
                    continue
                oracle.write(oracle.of_layers(holder, layers or own), address, positions)
                part = address if last else RequestAddress(positions.stop, address.spans)
                ends = last and (layers is None or max(own) in layers)
                chunk = {"tokens": positions, "layers": layers, "last": ends}
                endpoint.send(room, part, **chunk, aux=aux if ends else None)

        def wait(room):
            return [(each.wait(room, PATIENCE / 4), each.failure(room)) for _, _, each in held]

        yield [endpoint.address for _, _, endpoint in held], {"send": send, "wait": wait}


def serve(pipe: Any) -> None:
    """Answers calls, one case after the other, until it is told to end."""
    with ExitStack() as case:
        calls: dict[str, Any] = {}
        while told := pipe.recv():
            name, given = told
            answer, problem = None, None
            try:
                if name == "open":
                    answer, calls = case.enter_context(offered(*given))
                elif name == "close":
                    case.close()
                else:
                    answer = calls[name](*given)
            except Exception:
                problem = traceback.format_exc()
            pipe.send((answer, problem))


class Farm:
    """The processes, by engine; one that has died is replaced, and who called it is told."""

    def __init__(self) -> None:
        self._running: dict[str, Child] = {}

    @contextmanager
    def case(self, engine: str, ranks: Sequence[Sequence[Any]], tokens: int) -> Iterator[Any]:
        """Opens endpoints over there; yields their addresses and `call(name, *arguments)`."""

        def call(name, *given):
            return self._call(engine, name, *given)

        try:
            yield call("open", engine, ranks, tokens), call
        finally:
            if engine in self._running:
                call("close")

    def end(self) -> None:
        """Ends all processes; each must exit well."""
        for engine in list(self._running):
            with self._running.pop(engine) as child:
                status = child.close()
            assert status == 0, f"farm of {engine}: exit status {status}"

    def _call(self, engine: str, name: str, *given: Any) -> Any:
        child = self._running.get(engine) or Child(serve)
        self._running[engine] = child
        try:
            answer, problem = child.ask(name, given)
        except (AssertionError, EOFError, OSError):
            with self._running.pop(engine):
                child.process.join(1)
                status = child.process.exitcode
            how = "does not answer" if status is None else f"ended with status {status}"
            raise RuntimeError(f"farm of {engine}: {how}, asked to {name}.") from None
        if problem is not None:
            raise RuntimeError(f"farm of {engine}, asked to {name}:\n{problem}")
        return answer
