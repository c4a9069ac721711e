"""Small engines over one store, of different geometries: they begin requests with what is there,
compare its bytes, compute the rest, and store it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.store import Store
from kvpool import Allocator, MHAPool, PrefixCache, Shard
from kvpool.layout import RequestAddress, Span
from tests.disagg.store.traffic import MOST_TOKENS, Planes, Turn, state_of

CHUNK = 64
HEADS = 2
MODEL = {"layers": range(1), "num_kv_heads": HEADS, "head_dim": 4, "dtype": "bf16"}
SECONDS = 3600.0
"""After which a job is late: none is, however long the machine is busy or the process stopped."""


class AskedStore(Store):
    """Counts what it is asked for, to compare with what it says of itself."""

    asked = 0
    begun = 0
    taken = 0

    def ask(self, *arguments, **options):
        self.asked += 1
        return super().ask(*arguments, **options)

    def read(self, *arguments, **options):
        self.begun += 1
        return super().read(*arguments, **options)

    def write(self, *arguments, **options):
        objects = super().write(*arguments, **options)
        self.taken += objects
        return objects

    def miscounts(self) -> list[str]:
        """What its counts say, once nothing is under way, and what they should."""
        counts = self.stats().counts
        sums = {  # no floor of these tests does not answer
            ("hit", "miss", "away"): self.asked,
            ("read", "aborted", "late", "damaged", "vanished", "refused"): self.begun,
            ("written", "already there", "not written"): self.taken,
            ("unreachable",): 0,
        }
        wrong = []
        for names, expected in sums.items():
            total = sum(counts[name] for name in names)
            if total != expected:
                wrong.append(f"{', '.join(names)}: {total:,}, and {expected:,} were asked for")
        return wrong


@dataclass
class Served:
    """What has become of an engine's requests."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, tokens: int, reused: int, wrong: int) -> None:
        self.counts["requests"] += 1
        self.counts["tokens"] += tokens
        self.counts["reused requests"] += reused > 0
        self.counts["reused tokens"] += reused
        self.counts["wrong"] += wrong


class CachedEngine:
    """One rank whose allocator has a prefix cache with the store."""

    def __init__(self, url: str, *, page: int, pages: int, order: str) -> None:
        self.pool = MHAPool(**MODEL, num_pages=pages, page_size=page, order=order)
        store = AskedStore(url, self.pool.layout, chunk_tokens=CHUNK, threads=2, timeout=SECONDS)
        self.stores, self.served = [store], Served()
        self.allocator = Allocator(self.pool, prefix=PrefixCache(store=store))
        self._planes = Planes(self.pool, range(HEADS))

    def serve(self, turn: Turn) -> None:
        allocator, tokens = self.allocator, turn.tokens
        state = state_of(turn.tenant, tokens)
        request = allocator.new_request(turn.prompt[:-1], salt=turn.salt)
        reused = request.num_tokens
        places = allocator.locations(request)["kv"]
        wrong = self._planes.wrong(places, state[:reused])
        places = allocator.extend(request, tokens.size - reused)["kv"]
        self._planes.put(places, state[reused:])
        allocator.store(request, tokens[reused:])
        allocator.free(request)
        self.served.add(tokens.size, reused, wrong)

    def finish(self) -> None:
        self.allocator.check_integrity()


@dataclass
class _Begun:
    """A request of a batch, in its own pages: `found` tokens are to be read."""

    turn: Turn
    pages: np.ndarray
    found: int = 0
    reused: int = 0


class BatchedEngine:
    """Two ranks with half the heads each, that serve some requests at once without waiting for one,
    as a serving engine's connector does; some are aborted.
    """

    def __init__(self, url: str, *, page: int, batch: int, seed: int) -> None:
        self._page, self._batch = page, batch
        self._each = -(-MOST_TOKENS // page)
        self._pools = [
            MHAPool(**MODEL, num_pages=1 + batch * self._each, page_size=page, shard=Shard(rank, 2))
            for rank in range(2)
        ]
        layouts = [pool.layout for pool in self._pools]
        self.stores = [
            AskedStore(
                url,
                layout,
                chunk_tokens=CHUNK,
                ranks=layouts,
                rank=rank,
                threads=1,
                timeout=SECONDS,
            )
            for rank, layout in enumerate(layouts)
        ]
        self.served = Served()
        self._planes = [
            Planes(pool, range(rank, rank + 1)) for rank, pool in enumerate(self._pools)
        ]
        self._random, self._pick = np.random.default_rng(seed), random.Random(seed)
        self._waiting: list[Turn] = []

    def serve(self, turn: Turn) -> None:
        self._waiting.append(turn)
        if len(self._waiting) == self._batch:
            self.finish()

    def finish(self) -> None:
        """Serves the requests that wait for the batch to be full."""
        pages = 1 + self._random.permutation(self._batch * self._each)
        batch = [
            _Begun(turn, pages[n * self._each : (n + 1) * self._each])
            for n, turn in enumerate(self._waiting)
        ]
        self._waiting = []
        self._read(batch)
        for begun in batch:
            self._compute(begun)

    def _read(self, batch: Sequence[_Begun]) -> None:
        lead, jobs = self.stores[0], {}
        for begun in batch:
            prompt = begun.turn.prompt[:-1]
            jobs[lead.ask(prompt, begun.turn.salt)] = begun
        hits = self._ended(lead, jobs)
        reads: list[dict[int, _Begun]] = [{} for _ in self.stores]
        for begun, ended in hits:
            begun.found = begun.reused = ended.hit.tokens
            keys = lead.keys(begun.turn.prompt, begun.turn.salt)
            for store, jobs in zip(self.stores, reads) if begun.found else ():
                address = self._address(begun, begun.found)
                jobs[store.read(keys, address, hit=ended.hit)] = begun
        for store, jobs in zip(self.stores, reads):
            for job in [job for job in jobs if self._pick.random() < 0.05]:
                store.abort(job)
                jobs.pop(job).reused = 0
            for begun, ended in self._ended(store, jobs):
                if ended.failure:
                    begun.reused = 0

    def _ended(self, store: Store, jobs: dict[int, _Begun]):
        ends, until = [], time.monotonic() + SECONDS
        while len(ends) < len(jobs):
            ended = [(jobs[one.job], one) for one in store.ended() if one.job in jobs]
            ends += ended
            if not ended:
                assert time.monotonic() < until, "a job does not end"
                time.sleep(0.0002)
        return ends

    def _compute(self, begun: _Begun) -> None:
        turn, reused = begun.turn, begun.reused
        tokens = turn.tokens
        state, places = state_of(turn.tenant, tokens), self._places(begun, tokens.size)
        wrong = sum(planes.wrong(places[:reused], state[:reused]) for planes in self._planes)
        for store, planes in zip(self.stores, self._planes):
            planes.put(places[reused:], state[reused:])
            address = self._address(begun, tokens.size)
            store.write(tokens, address, range(reused, tokens.size), salt=turn.salt)
        self.served.add(tokens.size, reused, wrong)

    def _address(self, begun: _Begun, tokens: int) -> RequestAddress:
        count = -(-tokens // self._page)
        return RequestAddress(tokens, {"kv": Span(begun.pages[:count])})

    def _places(self, begun: _Begun, tokens: int) -> np.ndarray:
        pages, entries = np.divmod(np.arange(tokens), self._page)
        return begun.pages[pages] * self._page + entries
