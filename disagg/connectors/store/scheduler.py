"""The store's half in an engine's scheduler: how much of a request is stored, and which chunks are
to be written. It sees tokens and block ids, never memory. Nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from disagg.connectors.blocks import Blocks
from disagg.connectors.rank.stats import Stats
from disagg.connectors.settings import Settings
from disagg.connectors.store.steps import Opening, States, StoreRead, StoreStep, StoreWrite
from disagg.log import log
from disagg.protocol.messages import Convention
from disagg.store import ChunkKeys, Hit, Store
from disagg.store.keys import grown
from kvpool.prefix.chain import Chain, Media, Tokens, token_ids


@dataclass(slots=True, kw_only=True)
class _StoredRequest:
    """`token_ids` is the engine's own list, which grows. `most` of them have keys. The first
    `stored` chunks need not be written; `hit_tokens` were found, with the state at their end. Of
    one with `reads` False nothing is read. While `asked` is there, a lookup may be adding to the
    chain.
    """

    token_ids: Sequence[int]
    chain: Chain
    most: int
    reads: bool
    stored: int = 0
    hit_tokens: int = 0
    asked: ChunkKeys | None = None
    job: int | None = None
    hit: Hit | None = None


class StoreScheduler:
    """Decides; `step()` takes what was decided since the last time.

    The last `recomputes` tokens of a request are computed here. Hits are multiples of `unit`
    tokens: if an engine finds prefixes in its own cache by whole blocks, a block that was read
    in part would serve other requests as a whole.
    """

    def __init__(self, settings: Settings, *, recomputes: int = 1, unit: int = 1) -> None:
        self.stats = Stats("scheduler")
        self._settings, self._recomputes = settings, recomputes
        self._chunk = settings.chunk_tokens
        self._unit = math.lcm(self._chunk, unit)
        self._store: Store | None = None
        self._step = StoreStep()
        self._requests: dict[str, _StoredRequest] = {}
        self._asked: dict[int, _StoredRequest] = {}
        self._reading: set[str] = set()
        self._written: set[str] = set()
        """Requests whose blocks may not be copied yet."""

    def open(self, ranks: Sequence[tuple[bytes, Mapping[str, Convention]]]) -> None:
        """Opens the store, of all ranks: of each its layout, encoded, and conventions. Raises
        ValueError, and FloorError where the floor does not answer.
        """
        opening = Opening.of(ranks)
        self._store = opening.store(self._settings)
        self.stats.watch_store(self._store.stats)
        self._step.opening = opening
        log.info("store %s: namespace %s", self._store.url, self._store.namespace)

    def step(self) -> StoreStep:
        step, self._step = self._step, StoreStep()
        if self._store is not None:
            self._take_ended(self._store)
        return step

    def arrived(
        self,
        name: str,
        token_ids: Sequence[int],
        salt: str,
        *,
        media: Media = (),
        most: int | None = None,
        reads: bool = True,
    ) -> None:
        """A new request, whose first `most` tokens, with `media` among them, can be keyed. Requests
        that cannot be keyed at all are not passed here.
        """
        request = _StoredRequest(
            token_ids=token_ids,
            chain=Chain(self._chunk, salt, media),
            most=1 << 62 if most is None else most,
            reads=reads,
        )
        self._requests[name] = request
        if self._store is not None and reads:
            self._ask(self._store, request)

    def matched(self, name: str, computed: int) -> int | None:
        """How many tokens behind `computed` are stored. None until that is known."""
        request = self._requests.get(name)
        if request is None or self._store is None or self._findable(request) <= computed:
            return 0
        self._take_ended(self._store)
        if request.hit is None and request.job is None:
            self._ask(self._store, request)
        if request.hit is None:
            return None
        return max(0, request.hit.tokens - computed)

    def allocated(self, name: str, blocks: Callable[[], Blocks], external: int) -> None:
        """Blocks were allocated, for `external` tokens of the store's. What a later lookup finds,
        after a preemption, is another matter.
        """
        request = self._requests.get(name)
        if request is None or request.hit is None:
            return
        hit, request.hit = request.hit, None
        if not external:
            return
        self._step.reads.append(
            StoreRead(
                request=name,
                keys=self._keys(request, hit.tokens // self._chunk),
                hit=hit,
                blocks=blocks(),
                start=hit.tokens - external,
                stop=hit.tokens,
            )
        )
        self._reading.add(name)

    def kept(self, requests: Callable[[], Collection[str]]) -> None:
        """Which requests the next step computes in the blocks that they had before it. Those of
        others may be used again.
        """
        if self._written and not self._written.issubset(requests()):
            self._written.clear()
            self._step.settles = True

    def computed(
        self,
        name: str,
        stop: int,
        blocks: Callable[[], Blocks],
        states: States | None = None,
    ) -> None:
        """A step computes a request up to `stop` tokens, drafts and tokens that are not known yet
        among them. `states`: where state that it has once lies at other ends. What it fills of
        chunks is written behind the step.
        """
        request = self._requests.get(name)
        if request is None or self._store is None:
            return
        due = min(stop, len(request.token_ids), request.most) // self._chunk
        ends = {
            n: group_blocks
            for n, group_blocks in (states or {}).items()
            if self._ends_chunk(n, request, due)
        }
        ends.pop(stop, None)  # it lies where the block table says
        first = min([request.stored, *(n // self._chunk - 1 for n in ends)])
        if due <= first:
            return
        keys = self._keys(request, due)
        self._step.writes.append(
            StoreWrite(
                request=name,
                parent=keys[first - 1] if first else None,
                keys=keys[first:],
                first=first,
                blocks=blocks(),
                computed=stop,
                states=ends,
            )
        )
        request.stored = max(request.stored, due)
        self._written.add(name)

    def received(self, requests: Iterable[str], failed: Collection[str]) -> None:
        """Requests whose reads have ended, and those that are computed because theirs have failed.
        Their chunks are written again.
        """
        for name in self._reading.intersection(requests):
            self._reading.remove(name)
            request = self._requests.get(name)
            if request is not None and name in failed:
                request.reads, request.stored, request.hit_tokens = False, 0, 0

    def finished(self, name: str) -> None:
        """A request has ended, perhaps before its read."""
        request = self._requests.pop(name, None)
        if request is not None and request.job is not None:
            del self._asked[request.job]
        if name in self._reading:
            self._step.aborts.append(name)

    def stop(self, why: str) -> None:
        """From now on nothing is read or written."""
        if self._store is not None:
            log.warning("the store is off until the engine starts again: %s", why)
            self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _ends_chunk(self, tokens: int, request: _StoredRequest, due: int) -> bool:
        whole = tokens % self._chunk == 0 and 0 < tokens <= due * self._chunk
        return whole and tokens != request.hit_tokens

    def _findable(self, request: _StoredRequest) -> int:
        """How many tokens a lookup may find at most."""
        if not request.reads:
            return 0
        most = min(len(request.token_ids) - self._recomputes, request.most)
        return max(0, most // self._unit * self._unit)

    def _ask(self, store: Store, request: _StoredRequest) -> None:
        count = self._findable(request) // self._chunk
        if not count:
            request.hit = Hit(0)
            return
        request.asked = self._later_keys(request, count)
        request.job = store.ask(request.asked, step=self._unit)
        self._asked[request.job] = request

    def _later_keys(self, request: _StoredRequest, count: int) -> ChunkKeys:
        """Keys that the lookup's thread makes, where there are none yet."""
        chain = self._chain_of(request)
        if count <= chain.pages:
            return ChunkKeys(chain.keys[:count])
        return ChunkKeys.when_needed(count, partial(grown, chain, self._lacking(request, count)))

    def _keys(self, request: _StoredRequest, count: int) -> tuple[bytes, ...]:
        chain = self._chain_of(request)
        if chain.pages < count:
            chain.append(self._lacking(request, count))
        return tuple(chain.keys[:count])

    def _chain_of(self, request: _StoredRequest) -> Chain:
        """A request's chain, to which no lookup adds any more."""
        if request.asked is not None:
            request.asked.settle()
            request.asked = None
        return request.chain

    def _lacking(self, request: _StoredRequest, count: int) -> Tokens:
        """Those tokens of the first `count` chunks that the chain does not have."""
        return token_ids(request.token_ids[request.chain.num_tokens : count * self._chunk])

    def _take_ended(self, store: Store) -> None:
        for ended in store.ended():
            self.stats.changed()
            request = self._asked.pop(ended.job, None)
            if request is not None:
                request.job, request.hit = None, ended.hit
                request.hit_tokens = ended.hit.tokens
                request.stored = max(request.stored, request.hit_tokens // self._chunk)
