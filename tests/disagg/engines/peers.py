"""Prefill ranks in other processes, driven over a pipe."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from importlib.util import find_spec

from tests.processes import FORKS

# with mooncake if its package is installed
ENGINES = ("local", "nixl", *(["mooncake"] if find_spec("mooncake") else []))


def serve(pipe, engine, kind, arguments, tokens, seed) -> None:
    """Builds a pool, fills it with the oracle's values, and obeys the pipe."""
    import kvpool
    from disagg import PrefillEndpoint
    from disagg.engines.base import create_engine
    from tests import oracle

    pool = getattr(kvpool, kind)(**arguments)
    address = oracle.place(pool, tokens, seed)
    oracle.fill(pool, address)
    with PrefillEndpoint(pool.layout, create_engine(engine)) as endpoint:
        pipe.send(endpoint.address)
        while True:
            name, given = pipe.recv()
            if name == "close":
                break
            if name == "send":
                room, start, stop, last, aux = given
                part = oracle.RequestAddress(stop, address.spans)
                part = address if last else part
                endpoint.send(room, part, tokens=range(start, stop), last=last, aux=aux)
                pipe.send(None)
            elif name == "wait":
                with suppress(TimeoutError):
                    endpoint.wait(*given)
                pipe.send((endpoint.poll(given[0]), str(endpoint.failure(given[0]))))
            else:
                pipe.send(getattr(endpoint, name)(*given))
    pipe.send(None)


class Prefill:
    """A prefill rank in another process; calls go through the pipe."""

    def __init__(self, process, pipe) -> None:
        self.process, self.pipe = process, pipe
        self.address = self._answer()

    def call(self, name, *given):
        """Calls a method of the remote endpoint."""
        self.pipe.send((name, given))
        return self._answer()

    def send(self, room, start, stop, last=True, aux=None):
        """Sends a chunk."""
        return self.call("send", room, start, stop, last, aux)

    def _answer(self):
        assert self.pipe.poll(120), "the prefill process does not answer"
        return self.pipe.recv()


@contextmanager
def prefills(engine, kind, arguments, tokens):
    """One process per dict of `arguments`; each must exit with status 0."""
    ranks = []
    for seed, each in enumerate(arguments):
        here, there = FORKS.Pipe()
        process = FORKS.Process(
            target=serve, args=(there, engine, kind, each, tokens, seed), daemon=True
        )
        process.start()
        there.close()
        ranks.append((process, here))
    ranks = [Prefill(*rank) for rank in ranks]
    try:
        yield ranks
        for rank in ranks:
            rank.call("close")
            rank.process.join(30)
            assert rank.process.exitcode == 0
    finally:
        for rank in ranks:
            rank.process.kill()
