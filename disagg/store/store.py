"""One rank's door to a store of state that any engine has written."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy.typing as npt
from typing_extensions import Self

from disagg.protocol.messages import Convention, checked_conventions
from disagg.store.family import NamespaceFamily
from disagg.store.floors import open_floor
from disagg.store.floors.base import Floor, FloorError, NotThere
from disagg.store.geometry import Geometry, namespace
from disagg.store.jobs import DeferredAddress, EndedJob, Jobs, LookupJob, ReadJob
from disagg.store.keys import ChunkKeys, grown
from disagg.store.known import KnownObjects
from disagg.store.lookup import Hit, Lookup
from disagg.store.objects import Damaged
from disagg.store.outage import Outage
from disagg.store.stats import Outcomes, StoreStats
from disagg.store.transfer.reading import ObjectReader
from disagg.store.transfer.writing import ObjectWriter, default_room
from disagg.store.workers import Workers
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.prefix.chain import Chain, Media, token_ids

CHUNK_TOKENS = 256
CLOSE_SECONDS = 10.0
"""How long `close` waits for what is being written."""


class Store:
    """Reads and writes chunks of a pool. No call but `lookup` and `close` waits for the floor.

    `url` names a floor (`docs/store.md`), `layout` this rank's pool. Of an engine with several
    ranks, `ranks` are all their layouts and `rank` is this one's number. `conventions` is what
    bytes mean beside their layout (`disagg.connectors.conventions`). `timeout`: seconds after which
    a lookup or read that has not ended counts as failed. `room`: bytes in memory that are not
    written yet (default: a sixteenth of the host's memory, divided among the ranks, 256 MiB to
    8 GiB); what does not fit is not written. `cast` (True, or roles) also reads what engines have
    written whose rows have other formats, and converts it (docs/cast.md). Raises ValueError for a
    URL that names no floor, for a pool whose items chunks would cut, and FloorError where the
    floor is not there.
    """

    def __init__(
        self,
        url: str,
        layout: PoolLayout,
        *,
        conventions: Mapping[str, Convention] = MappingProxyType({}),
        chunk_tokens: int = CHUNK_TOKENS,
        ranks: Sequence[PoolLayout] = (),
        rank: int = 0,
        timeout: float = 10.0,
        room: int | None = None,
        threads: int = 4,
        cast: bool | Collection[str] = False,
    ) -> None:
        ranks = tuple(ranks) or (layout,)
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: 1 or more, got {chunk_tokens}.")
        if not 0 <= rank < len(ranks) or ranks[rank].fingerprint() != layout.fingerprint():
            raise ValueError(f"ranks: number {rank} of {len(ranks)} is not the layout given.")
        self.url, self.chunk_tokens, self.timeout = url, chunk_tokens, timeout
        conventions = checked_conventions(conventions)
        self.namespace, self.document = namespace(ranks, conventions, chunk_tokens)
        self._geometry = Geometry.of(ranks, conventions, chunk_tokens)
        self._floor: Floor = open_floor(url)
        self._outcomes, self._outage, self._known = Outcomes(), Outage(), KnownObjects()
        self._jobs = Jobs(self._outcomes)
        self._lookup = Lookup(
            self._floor,
            self.namespace,
            ranks,
            conventions=conventions,
            chunk_tokens=chunk_tokens,
            known=self._known,
            family=NamespaceFamily(self._floor, self.namespace, self.document),
            cast=cast,
        )
        self._lookup.judge(self._geometry)  # known from the start, and read rather than others
        self._reader = ObjectReader(self._floor, layout, conventions, cast)
        self._writer = ObjectWriter(
            self._floor,
            self.namespace,
            ranks,
            rank,
            self._geometry,
            room=default_room(len(ranks)) if room is None else room,
            outcomes=self._outcomes,
            publish=self._lookup.publish,
            known=self._known,
        )
        self._workers = Workers(threads, "kvpool store reader")

    def keys(self, tokens: npt.ArrayLike, salt: str = "", media: Media = ()) -> ChunkKeys:
        """The keys of the whole chunks of `tokens`; `salt` is whose they are: tenant, adapter."""
        chain, numbers = Chain(self.chunk_tokens, salt, media), token_ids(tokens)
        make = partial(grown, chain, numbers)
        return ChunkKeys.when_needed(numbers.size // self.chunk_tokens, make)

    def lookup(self, tokens: npt.ArrayLike | ChunkKeys, salt: str = "") -> int:
        """How many of the first tokens the store has. Waits for the floor, `timeout` at most."""
        return self.wait(self.ask(tokens, salt)).hit.tokens

    def ask(self, tokens: npt.ArrayLike | ChunkKeys, salt: str = "", *, step: int = 1) -> int:
        """Looks up the longest prefix that is a multiple of `step` tokens. `ended` tells the hit,
        by the number that this returns.
        """
        keys = self._keys(tokens, salt)
        total = keys.count * self.chunk_tokens
        job = self._jobs.lookup(total, time.monotonic() + self.timeout)
        if not total:  # the floor is not asked: this is no sign that it answers
            self._jobs.end(EndedJob(job.number, "lookup", Hit(0)), "miss", 0)
        elif self._outage.turns_away(self.timeout):
            why = f"{self.url} does not answer."
            self._jobs.end(EndedJob(job.number, "lookup", Hit(0), why), "away", total)
        else:
            self._workers.do(lambda: self._look(job, keys, step))
        return job.number

    def read(
        self,
        tokens: npt.ArrayLike | ChunkKeys,
        address: RequestAddress | DeferredAddress,
        positions: range | None = None,
        *,
        salt: str = "",
        hit: Hit | None = None,
    ) -> int:
        """Reads `positions` (default: all) of a prefix into a request's items. They end with the
        tokens of `address`, a multiple of `chunk_tokens`. `hit`: what a lookup has told, of as many
        tokens. `ended` tells when nothing is written to the items any more, by the number that this
        returns.
        """
        keys = self._keys(tokens, salt)
        wanted = range(address.num_tokens) if positions is None else positions
        total = keys.count * self.chunk_tokens
        if (
            wanted.step != 1
            or not 0 <= wanted.start < wanted.stop == address.num_tokens <= total
            or wanted.stop % self.chunk_tokens
        ):
            raise ValueError(
                f"positions {wanted}: they end with the {address.num_tokens} tokens of the block "
                f"table, a multiple of {self.chunk_tokens} and at most {total}."
            )
        if hit is not None and hit.tokens != wanted.stop:  # of other ends other state is needed
            raise ValueError(f"hit: of {hit.tokens} tokens, and {wanted.stop} are to be read.")
        job = self._jobs.read(address, wanted, time.monotonic() + self.timeout)
        self._workers.do(lambda: self._begin(job, keys, hit))
        return job.number

    def write(
        self,
        tokens: npt.ArrayLike | ChunkKeys,
        address: RequestAddress,
        positions: range | None = None,
        *,
        salt: str = "",
        held: bool = False,
    ) -> int:
        """Writes the whole chunks of `positions` (default: all) of a request. When it returns they
        are copied, or counted as not written; they reach the floor later. Returns how many objects
        will be written. State that a request has once is written where its tokens end a chunk.

        `held`: the request goes on, and its items are not given to others before `settle` returns:
        then what it does not overwrite may be copied until then, by another thread.
        """
        keys = self._keys(tokens, salt)
        wanted = range(address.num_tokens) if positions is None else positions
        first = -(-wanted.start // self.chunk_tokens)
        stop = min(wanted.stop, address.num_tokens) // self.chunk_tokens
        if stop > keys.count:
            raise ValueError(f"positions {wanted}: there are keys of {keys.count} chunks only.")
        if first >= stop:
            return 0
        return self._writer.write(keys.keys, address, range(first, stop), held=held)

    def settle(self) -> None:
        """Returns when all is copied that was written of `held` items. Waits for no floor."""
        self._writer.settle()

    def abort(self, job: int) -> None:
        """Ends a read: when this returns, nothing of it is written any more."""
        self._jobs.abort(job)

    def ended(self) -> list[EndedJob]:
        """Lookups and reads that have ended since the last call; those that are late fail now."""
        self._end_late()
        return self._jobs.take_ended()

    def wait(self, job: int) -> EndedJob:
        """How a lookup or read ends, which `ended` then does not tell. Waits, `timeout` at most.
        Raises ValueError for a job that is not under way.
        """
        return self._jobs.wait(job, self._end_late)

    def _end_late(self) -> None:
        """Ends what has taken too long: what hangs in a thread is left to it."""
        for job in self._jobs.late(time.monotonic()):
            why = f"{self.url} did not answer within {self.timeout} s."
            if isinstance(job, ReadJob):
                self._fail(job, "late", why)
                continue
            ended = EndedJob(job.number, "lookup", Hit(0), why)
            if self._jobs.end(ended, "unreachable", job.tokens, why):
                self._outage.failed()

    def stats(self) -> StoreStats:
        return self._outcomes.stats(self._writer.queued)

    def close(self) -> None:
        """Waits some seconds for what is being written; reads end as they are."""
        self._jobs.abort_reads()
        if self._writer.close(CLOSE_SECONDS) & self._workers.close(1.0):
            self._floor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys(self, tokens: npt.ArrayLike | ChunkKeys, salt: str) -> ChunkKeys:
        return tokens if isinstance(tokens, ChunkKeys) else self.keys(tokens, salt)

    def _find(self, keys: ChunkKeys, step: int = 1) -> tuple[Hit, str | None]:
        """What there is, or why that is not known."""
        try:
            hit = self._lookup.find(keys.keys, step)
        except FloorError as error:
            self._outage.failed()
            return Hit(0), str(error)
        self._outage.answered()
        return hit, None

    def _look(self, job: LookupJob, keys: ChunkKeys, step: int) -> None:
        if not self._jobs.is_under_way(job.number):  # it was late before it began
            return
        try:
            keys.settle()
        except ValueError as error:  # of numbers that are no tokens there is nothing
            self._jobs.end(EndedJob(job.number, "lookup", Hit(0)), "miss", job.tokens, str(error))
            return
        hit, failure = self._find(keys, step)
        ended = EndedJob(job.number, "lookup", hit, failure)
        if failure is not None:
            self._jobs.end(ended, "unreachable", job.tokens, failure)
        elif hit.tokens:
            self._jobs.end(ended, "hit", hit.tokens)
        else:
            why = " ".join(self._lookup.unusable.values())
            self._jobs.end(ended, "miss", job.tokens, why)

    def _begin(self, job: ReadJob, keys: ChunkKeys, hit: Hit | None) -> None:
        """Shares a read out among threads, object by object."""
        if job.ended:
            return
        try:
            keys.settle()
            _ = job.address  # is made here, before several threads need it
        except ValueError as error:
            self._fail(job, "refused", str(error))
            return
        if hit is None:
            chunks = job.tokens.stop // self.chunk_tokens
            hit, failure = self._find(ChunkKeys(keys.keys[:chunks]))
            if hit.tokens < job.tokens.stop:
                why = failure or f"the store has {hit.tokens} tokens of {job.tokens.stop}."
                self._fail(job, "unreachable" if failure else "vanished", why)
                return
        first = job.tokens.start // self.chunk_tokens
        sources = [source for source in hit.sources if source[1] >= first]
        job.left = len(sources)
        for kind, chunk, digest in sources:
            key = keys.keys[chunk]
            self._workers.do(partial(self._read, job, kind, chunk, key, digest))

    def _read(self, job: ReadJob, kind: str, chunk: int, key: bytes, digest: bytes) -> None:
        if job.ended:
            return
        try:
            geometry = self._lookup.geometry(digest)
            nbytes = self._reader.read(job, kind, chunk, key, geometry)
        except NotThere as error:
            self._fail(job, "vanished", str(error))
        except FloorError as error:
            self._fail(job, "unreachable", str(error))
        except Damaged as error:
            self._known.damaged(error.name)
            self._fail(job, "damaged", str(error))
        except ValueError as error:
            self._fail(job, "refused", str(error))
        else:
            self._one_read(job, nbytes)

    def _one_read(self, job: ReadJob, nbytes: int) -> None:
        with job.lock:
            job.left -= 1
            job.nbytes += nbytes
            done = not job.left and not job.ended
            job.ended |= done
        if done:
            ended = EndedJob(job.number, "read", Hit(job.tokens.stop))
            self._jobs.end(ended, "read", job.nbytes)

    def _fail(self, job: ReadJob, outcome: str, why: str) -> None:
        with job.lock:
            if job.ended:
                return
            job.ended = True
        self._jobs.end(EndedJob(job.number, "read", Hit(0), why), outcome, len(job.tokens), why)
