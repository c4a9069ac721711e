"""SGLang's radix cache with a store below it.

A prompt is looked up when it arrives. What the store has and the tree has not is read into slots of
the pool while other requests run, and then given to the tree: the request, which has waited, finds
an ordinary hit. What fails or is late is computed. Read in SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from disagg.connectors.sglang.pools import SglangLayout
from disagg.connectors.sglang_store.flows import Flow, Flows
from disagg.connectors.sglang_store.requests import keyed_tokens
from disagg.connectors.sglang_store.salts import salt_of
from disagg.connectors.sglang_store.slots import Slots
from disagg.store import ChunkKeys, Store, StoreStats

log = logging.getLogger("sglang.kvpool")

IN_FLIGHT = 4
"""One part in so many of the pool may be read to at a time."""
LINE_SECONDS = 60.0
"""Between two lines of the log that have the numbers of the store."""


class PromptKey(NamedTuple):
    """The key of a prompt in the tree, and the tokens of it that are in the store's chunks."""

    key: RadixKey
    tokens: int

    def first(self, tokens: int) -> RadixKey:
        """The key of its first tokens."""
        return self.key if tokens == self.tokens else self.key[:tokens]


class KvpoolRadixCache(UnifiedRadixCache):
    """`--radix-cache-backend kvpool`. Tokens whose state depends on more than the tree's key pass
    by the store: behind pictures, with adapters, embeddings, sessions, beams.
    """

    opened = False  # the parent's constructor calls `reset`
    flows: Flows
    off: str | None = None
    """Why the store is not used any more."""

    def open(self, store: Store, layout: SglangLayout, *, leads: bool, stream: Any) -> None:
        """`stream`: of the forward passes, on a device."""
        self.store, self.flows = store, Flows(store=store, leads=leads)
        self._slots = Slots(self, layout)
        self._stream = stream
        self._asking: Any = None
        """The request of the last match."""
        self._stored: dict[str, int] = {}
        """By request, how many of its tokens are written, or were in the store."""
        self._computed: dict[str, int] = {}
        """By request, how many of its tokens were under way when it was written last."""
        self._next_line, self._last = time.monotonic() + LINE_SECONDS, store.stats()
        self.opened = True

    def turn_off(self, why: str) -> None:
        """Ends reads, and neither reads nor writes from now on."""
        if self.off is None:
            self.off = why
            log.warning("the store is off until the engine starts again: %s", why)
            for flow in self._open_flows():
                self._end(flow)

    # what SGLang's scheduler calls of caches with storage

    def is_backuped(self, node_id: Any) -> bool:
        return True  # the store needs no node of the tree

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if params.req is not None:
            self._asking = params.req
        return super().match_prefix(params)

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Sequence[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request has arrived, whose prefix was just matched."""
        req, self._asking = self._asking, None
        if self.off or self.flows.get(request) is not None:
            return
        if req is None or req.cache_request_handle != request:
            return
        tokens = array("q", matched_prefix_tokens or ())
        matched = len(tokens)
        tokens.extend(new_input_tokens)
        count = min(len(tokens), keyed_tokens(req))
        count = count // self.store.chunk_tokens * self.store.chunk_tokens
        if count <= matched:
            return
        del tokens[count:]
        key = RadixKey(tokens, extra_key, cache_salt=cache_salt)
        keys = ChunkKeys.when_needed(
            count // self.store.chunk_tokens,
            lambda: self.store.keys(tokens, salt_of(cache_salt, extra_key)).keys,
        )
        self.flows.begin(request, keys, PromptKey(key, count))

    def check_prefetch_progress(self, request: Any) -> bool:
        flow = self.flows.get(request)
        if flow is not None:
            flow.wanted = True
        return flow is None

    def check_hicache_events(self) -> None:
        """In each step of the scheduler, on all ranks."""
        self._tell()
        if not len(self.flows):
            return
        self.flows.turn()
        numbers = np.array(self.flows.says(), dtype=np.int64)
        # torch takes ten times as long for a tensor of a list
        self._all_reduce_attn_groups(torch.from_numpy(numbers), torch.distributed.ReduceOp.MIN)
        for flow in self.flows.agreed(numbers.tolist()):
            self._landed(flow)
        for flow in self.flows:
            if flow.tokens is not None and flow.place is None:
                self._begin(flow)

    def has_pending_cache_operations(self) -> bool:
        return bool(self._open_flows())

    def release_aborted_request(self, request: Any) -> None:
        flow = self.flows.get(request)
        if flow is not None:
            self._end(flow)
        self._stored.pop(request.rid, None)
        super().release_aborted_request(request)

    def clear_storage_backend(self) -> bool:
        log.warning("the store was not cleared, as others use it too: use `kvpool store gc`.")
        return False

    def release_host_resources(self) -> None:
        super().release_host_resources()
        self.store.close()

    # the tree

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Writes before the tree lets go of what is out of a window."""
        if not self.off and keyed_tokens(req):
            try:
                self._write(req, up_to)
            except Exception:  # the engine serves on
                log.exception("request %s is not written to the store", req.rid)
        super().checkpoint(req, up_to=up_to, **kwargs)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._stored.pop(req.rid, None)
        self._computed.pop(req.rid, None)

    def reset(self) -> None:
        for flow in self._open_flows():
            self._end(flow)
        super().reset()

    def protected_size(self) -> int:
        return self._in_flight() + int(super().protected_size())

    def full_protected_size(self) -> int:
        return self._in_flight() + int(super().full_protected_size())

    def swa_protected_size(self) -> int:
        windows = (p.positions.stop - p.window_start for p in self._places())
        slots = sum(windows) if self.supports_swa() else 0
        return slots + int(super().swa_protected_size())

    def mamba_protected_size(self) -> int:
        states = sum(place.state is not None for place in self._places())
        return states + int(super().mamba_protected_size())

    # flows

    def _open_flows(self) -> list[Flow]:
        return list(self.flows) if self.opened else []

    def _places(self) -> list[Any]:
        return [flow.place for flow in self._open_flows() if flow.place is not None]

    def _in_flight(self) -> int:
        return sum(len(place.positions) for place in self._places())

    def _begin(self, flow: Flow) -> None:
        """Begins to read what the store has and the tree has not, if there are slots."""
        prompt, total = flow.context, flow.tokens or 0
        prefix = super().match_prefix(MatchPrefixParams(key=prompt.first(total)))
        start = prefix.device_prefix_len
        self._stored[flow.name.rid] = total
        if total <= start or not self._slots.fits(total):
            self._end(flow)
            return
        reading, count = self._in_flight(), total - start
        if reading and (reading + count) * IN_FLIGHT > self.token_to_kv_pool_allocator.size:
            return
        place = self._slots.allocate(
            prefix.last_device_node, range(start, total), evict=flow.wanted
        )
        if place is not None:
            self.flows.read(flow, place, self._fence())
        elif flow.wanted:
            self._end(flow)

    def _landed(self, flow: Flow) -> None:
        """A read has ended on all ranks."""
        place = flow.place
        if flow.landed != place.positions.stop:
            self._stored.pop(flow.name.rid, None)  # it is written again
            self._end(flow)
            return
        self.flows.drop(flow)
        self._slots.insert(place, flow.context.first(place.positions.stop))
        self.prefetch_loaded_tokens_by_reqid[flow.name] = len(place.positions)
        self.prefetch_loaded_storage_start_by_reqid[flow.name] = place.positions.start

    def _end(self, flow: Flow) -> None:
        """Ends a flow, whose request is computed."""
        self.flows.drop(flow)
        if flow.place is not None:
            self._slots.free(flow.place)

    def _fence(self) -> Any:
        """What is over when no forward pass writes to slots that are free now."""
        if self._stream is None:
            return None
        event = torch.get_device_module(self._stream.device.type).Event()
        event.record(self._stream)
        return event

    def _write(self, req: Any, up_to: int) -> None:
        """Writes chunks of a request that are computed and not yet written."""
        rid, chunk = req.rid, self.store.chunk_tokens
        ended, first = up_to, self._stored.get(rid, 0)
        if self._stream is not None:
            if req.inflight_middle_chunks > 0:  # its last pass may not be over: next time
                ended = self._computed.get(rid, 0)
            self._computed[rid] = up_to
            torch.get_device_module(self._stream.device.type).current_stream().synchronize()
        ended = min(ended, keyed_tokens(req))
        if ended // chunk * chunk <= first:
            return
        whole = ended == req.kv.kv_committed_len == up_to
        tokens = req.full_untruncated_fill_ids[: ended // chunk * chunk]
        keys = self.store.keys(tokens, salt_of(req.cache_salt, req.extra_key))
        table = self._slots.held(req, ended, state=whole)
        self.store.write(keys, table, range(first, ended))
        self._stored[rid] = ended // chunk * chunk

    def _tell(self) -> None:
        """Says in the log what has become of the store, if anything has."""
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + LINE_SECONDS
        stats, last = self.store.stats(), self._last
        if stats.counts != last.counts:
            log.info("kvpool store: %s", line(stats, last))
            self._last = stats


def line(stats: StoreStats, last: StoreStats) -> str:
    """What has changed, in words."""
    parts = []
    for outcome, count in stats.counts.items():
        if count != last.counts[outcome]:
            more, reason = stats.sizes[outcome] - last.sizes[outcome], stats.reasons.get(outcome)
            why = f": {reason}" if reason else ""
            parts.append(f"{outcome} {count - last.counts[outcome]} ({more}{why})")
    return ", ".join(parts)
