"""The store's half in a worker of an engine: reads to blocks and writes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from disagg.connectors.blocks import BlockGroup, block_table
from disagg.connectors.rank.stats import Stats
from disagg.connectors.settings import Settings
from disagg.connectors.store.steps import Opening, StoreRead, StoreStep, StoreWrite
from disagg.store import ChunkKeys, Store
from kvpool.layout import PoolLayout, RequestAddress, Span


@dataclass(slots=True)
class StoreResults:
    """Requests whose reads have ended, and those of them that have `failed`."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class StoreWorker:
    """Does what a scheduler step asks of a rank. `groups` are the engine's cache groups. A store
    that cannot be opened ends nothing: all is computed.
    """

    def __init__(
        self,
        settings: Settings,
        layout: PoolLayout,
        groups: Sequence[BlockGroup],
        *,
        rank: int,
        log: logging.Logger,
    ) -> None:
        self._settings, self._layout, self._groups = settings, layout, groups
        self._rank, self._log = rank, log
        self._store: Store | None = None
        self.stats: Stats | None = None
        """Of the rank, if it is to count what becomes of the store."""
        self._reads: dict[int, str] = {}
        """Requests, by the number of what is read for them."""
        self._results = StoreResults()

    def settle(self, step: StoreStep) -> None:
        """Before anything of the step is written to blocks: what lies in them is copied first."""
        if step.settles and self._store is not None:
            self._store.settle()

    def begin(self, step: StoreStep, clear: Callable[[StoreRead], None]) -> None:
        """Begins to read; `clear` sets to 0 what a read does not fill."""
        if step.opening is not None:
            self._open(step.opening)
        for name in step.aborts:
            self._abort(name)
        for read in step.reads:
            try:
                clear(read)
                self._read(read)
            except Exception as error:  # of one request: the engine serves others
                self._failed(read.request, error)

    def save(self, step: StoreStep) -> None:
        """Copies what the step has computed, on the stream that it was computed on; in host memory
        behind it, until a step `settles`.
        """
        for write in step.writes:
            try:
                self._write(write)
            except Exception as error:
                traceback = not isinstance(error, ValueError)
                self._log.error(
                    "request %s is not stored: %s", write.request, error, exc_info=traceback
                )

    @property
    def reading(self) -> bool:
        """Whether a request waits for what is stored."""
        return bool(self._reads)

    def results(self) -> StoreResults:
        """What has ended since the last call."""
        if self._store is not None:
            for ended in self._store.ended():
                if self.stats is not None:
                    self.stats.changed()
                name = self._reads.pop(ended.job, None)
                if name is not None:
                    self._results.received.add(name)
                    if ended.failure:
                        self._failed(name, ended.failure)
        results, self._results = self._results, StoreResults()
        return results

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self, opening: Opening) -> None:
        try:
            self._store = opening.store(self._settings, self._rank, self._layout)
        except (ValueError, OSError) as error:
            self._log.error("the store is off on rank %s: %s", self._rank, error)
        else:
            if self.stats is not None:
                self.stats.watch_store(self._store.stats)

    def _read(self, read: StoreRead) -> None:
        if self._store is None:
            raise ValueError("the store is off on this rank.")
        table = block_table(self._groups, read.blocks, read.stop)
        positions = range(read.start, read.stop)
        job = self._store.read(ChunkKeys(read.keys), table, positions, hit=read.hit)
        self._reads[job] = read.request

    def _write(self, write: StoreWrite) -> None:
        if self._store is None:
            return
        # of the chunks before the first, the last one's key is asked for only
        before = () if write.parent is None else (write.parent,) * write.first
        keys = ChunkKeys(before + write.keys)
        chunk = self._settings.chunk_tokens
        stop = len(keys.keys) * chunk
        table = block_table(self._groups, write.blocks, write.computed)
        self._store.write(keys, table, range(write.first * chunk, stop), held=True)
        for tokens, blocks in write.states.items():
            state = RequestAddress(tokens, dict(self._states(blocks)))
            self._store.write(keys, state, range(tokens - chunk, tokens))

    def _states(self, blocks: Mapping[int, int]) -> Iterable[tuple[str, Span]]:
        for number, block in blocks.items():
            group = self._groups[number]
            if group.space:  # this rank has such layers
                yield group.space, Span.from_blocks([block], items_per_block=group.blocks)

    def _abort(self, request: str) -> None:
        for job in [job for job, name in self._reads.items() if name == request]:
            if self._store is not None:
                self._store.abort(job)
            del self._reads[job]
            self._results.received.add(request)

    def _failed(self, request: str, why: object) -> None:
        self._results.received.add(request)
        self._results.failed.add(request)
        self._log.warning("request %s is computed, and not read from the store: %s", request, why)
