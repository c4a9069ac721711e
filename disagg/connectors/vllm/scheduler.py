"""The connector's half in vLLM's scheduler: which requests are handed over, and when.

It sees requests and block ids, never memory, and imports nothing of vLLM. What it decides travels
to every worker as a `Step`, once a scheduler step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from disagg.connectors.blocks import Blocks
from disagg.connectors.source import (
    Source,
    named_room,
    prompt_digest,
    request_room,
    traceparent_in,
)
from disagg.connectors.steps import ReceiveTask, SendTask, Step
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import Latest

if TYPE_CHECKING:
    from disagg.connectors.vllm_store.requests import StoredRequests

log = logging.getLogger("vllm.kvpool")

OTHER_ROLES = ("remote_prefiller", "remote_kv_source")
"""Of `kv_transfer_params`: what proxies say to vLLM's offloading between peers."""
DELIVERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Statuses of a request whose prompt is computed to its end."""
KEPT_ROOMS = 10_000
"""Rooms that none is to be offered or asked for twice: the latest."""


@dataclass(slots=True, kw_only=True)
class _OfferedPrompt:
    """A request of prefill: `stop` positions, before token `following`; `sent` of them are sent.
    `samples`: that token is the one that prefill samples.
    """

    request: Any
    room: Room
    stop: int
    following: int | None
    samples: bool
    sent: int = 0


@dataclass(eq=False)
class ConnectorScheduler:
    """Decides; `step()` takes what was decided since the last time.

    `groups` is vLLM's KVCacheConfig. `stream`: prompts are offered while they are computed.
    `recomputes` of a prompt's last tokens decode computes itself: one for its logits, and as many
    as the drafter reads ahead, because of these prefill has only drafts where the prompt ends.
    `state`: recurrent state must exclude them, so prefill's request is cut there. `window`: what
    comes before a window is freed once prefill computes more than the prompt. `drafts`: a drafter
    runs. `waits`: a request of decode is computed in the step that asks for its state. `refusal`:
    why decode's requests are computed here. `store`: of an engine that has one.
    """

    groups: Any
    _: KW_ONLY
    produces: bool
    consumes: bool
    stream: bool = False
    recomputes: int = 1
    state: bool = False
    window: bool = False
    drafts: bool = False
    waits: bool = False
    refusal: str | None = None
    store: StoredRequests | None = None
    _addresses: tuple[str, ...] = ()
    _step: Step = field(default_factory=Step)
    _sending: dict[str, _OfferedPrompt] = field(default_factory=dict)
    _wanted: dict[str, Source] = field(default_factory=dict)
    _receiving: set[str] = field(default_factory=set)
    _named: Latest[Room, None] = field(default_factory=lambda: Latest(KEPT_ROOMS))
    _asked: Latest[Room, None] = field(default_factory=lambda: Latest(KEPT_ROOMS))
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def serve(self, addresses: Sequence[str]) -> None:
        """Endpoint addresses of this engine's prefill ranks, which decode is told."""
        self._addresses = tuple(addresses)

    def step(self) -> Step:
        step, self._step = self._step, Step()
        step.store = None if self.store is None else self.store.step()
        return step

    def arrived(self, request: Any) -> None:
        """A new request. One whose state cannot be had as its parameters ask is computed here."""
        params: dict[str, Any] = request.kv_transfer_params or {}
        name = request.request_id
        try:
            if params.get("do_remote_decode") and name not in self._sending:
                self._offers(request, params)
            if params.get("do_remote_prefill"):
                self._wants(request, params)
            elif others := [role for role in OTHER_ROLES if params.get(role)]:
                raise ValueError(
                    f"kv_transfer_params say {', '.join(others)}, which this connector does not "
                    "serve. Send do_remote_prefill and what prefill answered."
                )
        except ValueError as problem:
            log.error("request %s is computed here, and not handed over: %s", name, problem)
            self._decline(name)
        if self.store is not None:
            self.store.arrived(request)

    # prefill

    def _offers(self, request: Any, params: dict[str, Any]) -> None:
        """Prefill's request, cut where it must not compute what decode does. Of a `whole` one,
        decode is another engine's, which computes nothing of the prompt. Raises ValueError.
        """
        if not self.produces:
            raise ValueError("this engine is a kv_consumer. Send it to a kv_producer.")
        ids, name = request.prompt_token_ids, request.request_id
        if self.state and ids is None:
            raise ValueError("of embeddings, this model's state is not that of a token less.")
        whole, room = bool(params.get("whole")), named_room(params.get("room"), ids)
        if whole and self.recomputes > 1:
            raise ValueError("whole: the drafter's state ends before the prompt does.")
        if room is None or room in self._named:
            room = request_room(name, next(self._numbers))
        else:
            self._named[room] = None
        stop = request.num_prompt_tokens - (0 if whole else self.recomputes)
        following = ids[stop] if ids and stop >= 0 and not whole else None
        self._sending[name] = _OfferedPrompt(
            request=request, room=room, stop=stop, following=following, samples=whole
        )
        if stop < 1:
            return
        if self.state or self.window:
            request.max_tokens = 1
        if self.state and not whole:
            del ids[stop:]
            del request._all_token_ids[stop:]
            request.num_prompt_tokens = stop
        if self.state and self.drafts and not whole:
            # the drafter reads what is sampled as the token behind the prompt
            request.sampling_params.allowed_token_ids = [following]

    def scheduled(self, output: Any) -> None:
        """Offers what this step computes, where prompts are streamed, and stores it."""
        self._step.idle = not output.num_scheduled_tokens
        if self.store is not None:
            self.store.scheduled(output)
        if not self.stream:
            return
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            sending = self._sending.get(name)
            if sending and sending.sent:  # what was offered is lost with its blocks
                self._step.aborts.append(name)
                sending.room, sending.sent = request_room(name, next(self._numbers)), 0
        for name, tokens in output.num_scheduled_tokens.items():
            if sending := self._sending.get(name):
                # the last position goes with the token after it
                most = sending.stop - sending.samples
                stop = min(sending.request.num_computed_tokens + tokens, most)
                if stop > sending.sent:
                    blocks = output.kv_connector_block_state.resolve_block_ids(name)
                    self._send(sending, blocks, stop)

    def _send(self, sending: _OfferedPrompt, blocks: Any, stop: int) -> None:
        last = stop == sending.stop
        send = SendTask(
            request=sending.request.request_id,
            room=sending.room,
            blocks=self._transferred(blocks),
            start=sending.sent,
            stop=stop,
            last=last,
            following=sending.following if last else None,
        )
        self._step.sends.append(send)
        sending.sent = stop

    def _transferred(self, blocks: Any) -> Blocks:
        """Ids of the groups that are handed over."""
        return tuple(tuple(ids) for ids in self.groups.select_transfer_block_ids(blocks))

    # decode

    def _wants(self, request: Any, params: dict[str, Any]) -> None:
        """Decode's request has its state elsewhere. Raises ValueError."""
        if not self.consumes:
            raise ValueError("this engine is a kv_producer. Send it to a kv_consumer.")
        if self.refusal:
            raise ValueError(self.refusal)
        source = Source.read(params, request.prompt_token_ids)
        if source.room in self._asked:
            raise ValueError("its room is read by another sequence of the same prompt (n > 1).")
        self._asked[source.room] = None
        self._wanted[request.request_id] = source
        if self._handed_over(request, source) >= request.num_prompt_tokens:
            raise ValueError(
                f"prefill computed {source.tokens} tokens, the prompt has "
                f"{request.num_prompt_tokens}. Do both engines have the same chat template?"
            )
        source.check_prompt(request.prompt_token_ids)

    def _handed_over(self, request: Any, source: Source) -> int:
        """How many tokens prefill has, by what it said or else by what this engine computes."""
        return source.tokens or request.num_prompt_tokens - self.recomputes

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind `computed` prefill or the store has (None: it is asked); whether
        the request waits for them.
        """
        source = self._wanted.get(request.request_id)
        if source is None and self.store is not None:
            return self.store.matched(request, computed)
        more = 0 if source is None else self._handed_over(request, source) - computed
        return (more, not self.waits) if more > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks were allocated, for `external` tokens of prefill's or the store's."""
        name = request.request_id
        if self.store is not None and name not in self._wanted:
            self.store.allocated(request, blocks, external)
        elif not external:
            self._decline(name)
        elif source := self._wanted.pop(name, None):
            if not self.waits:
                self._receiving.add(name)
            stop = self._handed_over(request, source)
            start, ids = stop - external, self._transferred(blocks.get_block_ids())
            receive = ReceiveTask(
                request=name,
                source=source,
                blocks=ids,
                start=start,
                stop=stop,
                waits=self.waits,
                traceparent=traceparent_in(request.trace_headers),
            )
            self._step.receives.append(receive)

    def received(self, requests: Sequence[str]) -> None:
        """Requests whose rooms have ended."""
        self._receiving.difference_update(requests)

    def _decline(self, request: str) -> None:
        """Nothing is needed of prefill any more, if anything was."""
        if source := self._wanted.pop(request, None):
            self._step.declines.append(source)

    # both

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Whether a finished request's blocks stay until its room ends; decode's parameters."""
        name = request.request_id
        if name in self._receiving:  # stopped while it waits
            self._step.aborts.append(name)
        self._decline(name)
        if self.store is not None:
            self.store.finished(request)
        sending = self._sending.pop(name, None)
        if sending is None:
            return False, None
        if request.status.name not in DELIVERED or sending.stop < 1:
            if sending.sent:
                self._step.aborts.append(name)
            return False, None
        if sending.samples:
            sending.following = request.output_token_ids[0]
        if sending.sent < sending.stop:
            self._send(sending, blocks, sending.stop)
        ids, stop = request.prompt_token_ids, sending.stop
        prompt = None if ids is None else prompt_digest(ids[:stop])
        return True, Source(sending.room, self._addresses, prompt, stop).told()
