"""Requests of vLLM's scheduler, whose state is read from a store and written to it. Nothing of vLLM
is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from disagg.connectors.blocks import Blocks
from disagg.connectors.rank.stats import Numbers
from disagg.connectors.settings import Settings
from disagg.connectors.store.identity import Adapters, Identity
from disagg.connectors.store.media import MediaDigests
from disagg.connectors.store.scheduler import StoreScheduler
from disagg.connectors.store.steps import StoreStep
from disagg.connectors.vllm_store.media import media
from kvpool.prefix.chain import Media


class StoredRequests:
    """What a store has of requests. `groups` is vLLM's KVCacheConfig. With `stops`, a step of each
    prompt ends where its last chunk ends. `encoder` says what the model makes of media.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Any,
        *,
        recomputes: int = 1,
        unit: int = 1,
        stops: bool = False,
        encoder: str | None = None,
    ) -> None:
        self._chunk = settings.chunk_tokens if stops else 0
        self.scheduler = StoreScheduler(settings, recomputes=recomputes, unit=unit)
        self._groups, self._adapters, self._encoder = groups, Adapters(), encoder
        self._digests = MediaDigests(lambda item: item.get_data())
        self._requests: dict[str, Any] = {}
        """Those that the store may have a part of."""
        self._waiting: dict[str, tuple[Identity, Future[tuple[Media, int]]]] = {}
        """Those of them whose media's digests were asked for."""

    def arrived(self, request: Any) -> None:
        """A new request. Nothing is stored of one if nothing says what its state is of."""
        identity = self._identity(request)
        if identity is None:
            return
        self._requests[request.request_id] = request
        known_media, most = media(request, self._encoder)
        if known_media:
            self._waiting[request.request_id] = identity, self._digests.spans(known_media, most)
        else:
            self._begin(request, identity, (), most)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind `computed` are stored (None: not known yet); whether it waits."""
        if self._waits(request):
            return None, False
        more = self.scheduler.matched(request.request_id, computed)
        if self._chunk and request.request_id in self._requests:
            # vLLM stops there for a prefix that it knows to be shared, unless it knows of one
            end = (request.num_prompt_tokens - 1) // self._chunk * self._chunk
            request.shared_prefix_boundary = request.shared_prefix_boundary or end
        return more, bool(more)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks were allocated, for `external` tokens of the store's."""
        ids = partial(self._listed, blocks.get_block_ids)
        self.scheduler.allocated(request.request_id, ids, external)

    def scheduled(self, output: Any) -> None:
        """Stores the chunks that a step computes."""
        running = output.scheduled_cached_reqs
        self.scheduler.kept(lambda: {*running.req_ids} - running.resumed_req_ids)
        state = output.kv_connector_block_state
        offers, counts = state.boundary_state_offloads, output.num_scheduled_tokens
        for name in counts.keys() | offers.keys():
            request = self._requests.get(name)
            if request is not None and not self._waits(request):
                stop = request.num_computed_tokens + counts.get(name, 0)
                ids = partial(self._listed, state.resolve_block_ids, name)
                self.scheduler.computed(name, stop, ids, self._states(offers.get(name, ())))

    def received(self, output: Any) -> None:
        """Requests whose reads have ended, and those that have failed: a KVConnectorOutput."""
        self.scheduler.received(output.finished_recving or (), output.failed_recving)

    def finished(self, request: Any) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._waiting.pop(request.request_id, None)
            self.scheduler.finished(request.request_id)

    def step(self) -> StoreStep:
        return self.scheduler.step()

    def open(self, ranks: Iterable[Any]) -> None:
        """`ranks` have a `layout`, encoded, and `conventions`. Raises ValueError, FloorError."""
        self.scheduler.open([(rank.layout, rank.conventions) for rank in ranks])

    def reset(self) -> None:
        """What was kept is to count no more: the model's weights may be others."""
        self.scheduler.stop("its cache was reset, and its weights may be others.")

    def take(self) -> Numbers | None:
        """What has become of lookups since the last call."""
        return self.scheduler.stats.take()

    def close(self) -> None:
        self._digests.close()
        self.scheduler.close()

    def _begin(self, request: Any, identity: Identity, spans: Media, most: int) -> None:
        self.scheduler.arrived(
            request.request_id,
            request.all_token_ids,
            identity.salt,
            media=spans,
            most=most,
            # of a prompt whose logits are asked for, vLLM computes every token
            reads=not request.skip_reading_prefix_cache,
        )

    def _waits(self, request: Any) -> bool:
        """Whether it is not known yet what the media of a request are."""
        if request.request_id not in self._waiting:
            return False
        identity, digests = self._waiting[request.request_id]
        if not digests.done():
            return True
        del self._waiting[request.request_id]
        self._begin(request, identity, *digests.result())
        return False

    def _identity(self, request: Any) -> Identity | None:
        """Whose a request is; None if tokens and media do not say what its state is of."""
        lora, tokens, adapter = request.lora_request, request.prompt_token_ids, ""
        embedded = tokens is None or request.prompt_embeds is not None
        if embedded or request.pooling_params is not None or request.resumable:
            return None
        if lora is not None:
            digest = None if lora.load_inplace else self._adapters.digest(lora.lora_path)
            if digest is None:
                return None
            adapter = digest
        return Identity(request.cache_salt or "", adapter)

    def _listed(self, ids: Any, *name: str) -> Blocks:
        """Block ids of the groups that are transferred."""
        chosen = self._groups.select_transfer_block_ids(ids(*name))
        return tuple(tuple(group) for group in chosen)

    def _states(self, offers: Iterable[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
        """Blocks with recurrent state by number of tokens, which vLLM offers until the step ends:
        its block tables do not tell them.
        """
        ends: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            ends.setdefault(tokens, {})[self._groups.transfer_group_ids.index(group)] = block
        return ends
