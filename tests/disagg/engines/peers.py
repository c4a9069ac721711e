"""Prefill ranks in other processes, driven over a pipe."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec

from tests.processes import Child

# with mooncake if its package is installed
ENGINES = ("local", "nixl", *(["mooncake"] if find_spec("mooncake") else []))


def serve(pipe, engine, kind, arguments, tokens, seed) -> None:
    """Builds a pool, fills it with the oracle's values, and obeys the pipe."""
    import kvpool
    from disagg import PrefillEndpoint
    from disagg.engines.base import create_engine
    from tests import oracle

    pool = getattr(kvpool, kind)(**arguments)
    address = oracle.filled(pool, tokens, seed)
    with PrefillEndpoint(pool.layout, create_engine(engine)) as endpoint:
        pipe.send(endpoint.address)
        while order := pipe.recv():
            name, arguments = order
            if name == "send":
                room, start, stop, last, aux = arguments
                part = address if last else oracle.RequestAddress(stop, address.spans)
                endpoint.send(room, part, tokens=range(start, stop), last=last, aux=aux)
                pipe.send(None)
            elif name == "wait":
                with suppress(TimeoutError):
                    endpoint.wait(*arguments)
                room = arguments[0]
                pipe.send((endpoint.poll(room), str(endpoint.failure(room))))
            else:
                pipe.send(getattr(endpoint, name)(*arguments))


class Prefill(Child):
    """A prefill rank in another process; calls go through the pipe."""

    address: str

    def call(self, name, *arguments):
        return self.ask(name, arguments)

    def send(self, room, start, stop, last=True, aux=None):
        return self.call("send", room, start, stop, last, aux)


@contextmanager
def prefills(engine, kind, arguments, tokens):
    """One process per dict of `arguments`; each must exit with status 0."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Prefill(serve, engine, kind, options, tokens, seed))
            for seed, options in enumerate(arguments)
        ]
        for rank in ranks:
            rank.address = rank.answer()
        yield ranks
        for rank in ranks:
            assert rank.close() == 0
