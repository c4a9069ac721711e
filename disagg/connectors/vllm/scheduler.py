"""The connector's half in vLLM's scheduler: which requests are handed over, and when.

It sees requests and block ids, never memory, and imports nothing of vLLM. What it decides travels
to every worker as a `Step`, once a scheduler step.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("vllm.kvpool")

Blocks = tuple[Sequence[int], ...]
"""Block ids of a request by transferable cache group, as vLLM keeps them: 0 is the null block."""
DELIVERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Statuses of a request whose prompt is computed to its end."""


@dataclass(frozen=True, slots=True)
class Send:
    """Positions `start` to `stop` of a request are computed in `blocks`."""

    request: str
    room: str
    blocks: Blocks
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class Receive:
    """Positions `start` to `stop` of a request are to be read to `blocks`."""

    request: str
    room: str
    addresses: tuple[str, ...]
    blocks: Blocks
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Decline:
    """A room of which nothing is needed: prefill may have its blocks back."""

    room: str
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Step:
    """What the workers do in one step. `aborts` are requests."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class Scheduler:
    """Decides; `step()` takes what was decided since the last time.

    `groups` is vLLM's KVCacheConfig. `cuts`: decode computes the last prompt token again, for
    its logits. State that cannot be taken back (a Mamba state has seen the token) or that moves on
    with it (a window drops its oldest) must be that of one token less, so prefill's request is cut
    by one token.
    """

    def __init__(
        self, groups: Any, *, produces: bool, consumes: bool, stream: bool, cuts: bool
    ) -> None:
        self._groups, self._stream, self._cuts = groups, stream, cuts
        self._produces, self._consumes = produces, consumes
        self._addresses: tuple[str, ...] = ()
        self._step = Step()
        self._streamed: dict[str, tuple[Any, int]] = {}
        self._receiving: dict[str, str] = {}
        self._rooms: set[str] = set()
        self._made = 0

    def serve(self, addresses: Sequence[str]) -> None:
        """Endpoint addresses of this engine's prefill ranks, which decode is told."""
        self._addresses = tuple(addresses)

    def step(self) -> Step:
        """What was decided since the last call."""
        step, self._step = self._step, Step()
        return step

    # prefill

    def arrived(self, request: Any) -> None:
        """A new request. Prefill's is cut by the token that decode computes."""
        params = _params(request)
        if not params.get("do_remote_decode") or "kvpool_room" in params:
            return
        if not self._produces:
            log.error(
                "request %s is not handed over: this engine is a kv_consumer. Send it to a "
                "kv_producer.",
                request.request_id,
            )
            return
        named = params.get("room")
        params["kvpool_room"] = named if isinstance(named, str) and named else self._room(request)
        if self._cuts and request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
            del request.prompt_token_ids[-1:]
            del request._all_token_ids[-1:]
            request.num_prompt_tokens -= 1
            request.max_tokens = 1
            params["kvpool_cut"] = True
        if self._stream:
            self._streamed[request.request_id] = (request, 0)

    def scheduled(self, output: Any) -> None:
        """Offers what this step computes, where prompts are streamed."""
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            request, sent = self._streamed.get(name, (None, 0))
            if sent:  # what was offered is lost with its blocks: it begins again, in a new room
                self._step.aborts.append(name)
                _params(request)["kvpool_room"] = self._room(request)
                self._streamed[name] = (request, 0)
        for name, count in output.num_scheduled_tokens.items():
            if name not in self._streamed:
                continue
            request, sent = self._streamed[name]
            stop = min(request.num_computed_tokens + count, self._total(request))
            if stop > sent:
                held = output.kv_connector_block_state.resolve_block_ids(name)
                self._send(request, held, sent, stop)
                self._streamed[name] = (request, stop)

    def _send(self, request: Any, blocks: Any, start: int, stop: int) -> None:
        ids = self._groups.select_transfer_block_ids(blocks)
        room, last = _params(request)["kvpool_room"], stop == self._total(request)
        held = tuple(tuple(group) for group in ids)
        self._step.sends.append(Send(request.request_id, room, held, start, stop, last))

    def _room(self, request: Any) -> str:
        """A name that no other request of this engine has had."""
        self._made += 1
        return f"{request.request_id}#{self._made}"

    def _total(self, request: Any) -> int:
        """Positions that are handed over: all but the token that decode computes."""
        cut = _params(request).get("kvpool_cut", False)
        return int(request.num_prompt_tokens) - (0 if cut else 1)

    # decode

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens beyond the `computed` ones will come from prefill."""
        params = _params(request)
        if not params.get("do_remote_prefill"):
            return 0, False
        problem = self._problem(request, params)
        if problem is not None:
            log.error("request %s is computed here: %s", request.request_id, problem)
            self._decline(params)
            return 0, False
        more = request.num_prompt_tokens - 1 - computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks were allocated, for `external` tokens of prefill's."""
        params = _params(request)
        if not params.get("do_remote_prefill"):
            return
        if not external:
            self._decline(params)
            return
        params["do_remote_prefill"] = False
        stop = request.num_prompt_tokens - 1
        ids = self._groups.select_transfer_block_ids(blocks.get_block_ids())
        room = params["remote_request_id"]
        self._rooms.add(room)
        self._receiving[request.request_id] = room
        self._step.receives.append(
            Receive(
                request.request_id,
                room,
                tuple(params["remote_addresses"]),
                tuple(tuple(group) for group in ids),
                stop - external,
                stop,
            )
        )

    def received(self, requests: Sequence[str]) -> None:
        """Requests whose rooms have ended."""
        for name in requests:
            self._rooms.discard(self._receiving.pop(name, ""))

    def _problem(self, request: Any, params: dict[str, Any]) -> str | None:
        """Why prefill's state is not this request's, or cannot be had."""
        if not self._consumes:
            return "this engine is a kv_producer. Send it to a kv_consumer."
        missing = [key for key in ("remote_request_id", "remote_addresses") if not params.get(key)]
        if missing:
            return f"kv_transfer_params have no {', '.join(missing)}. Did a kvpool prefill answer?"
        if _source(params) is None:
            return (
                "kv_transfer_params: remote_request_id is text, remote_addresses a list of texts."
            )
        if params["remote_request_id"] in self._rooms:
            return "another sequence of the same prompt reads its room (n > 1)."
        theirs, ours = params.get("remote_prompt"), prompt_digest(request)
        if theirs is not None and ours is not None and theirs != ours:
            return (
                f"prefill computed another prompt ({theirs}), this one is {ours}. Do both engines "
                "have the same tokenizer and chat template?"
            )
        return None

    def _decline(self, params: dict[str, Any]) -> None:
        params["do_remote_prefill"] = False
        source = _source(params)
        if self._consumes and source is not None and source[0] not in self._rooms:
            self._step.declines.append(Decline(*source))

    # both

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks stay until its room has ended, and the
        parameters for decode.
        """
        params, name = _params(request), request.request_id
        if name in self._receiving:  # stopped while it waits
            self._step.aborts.append(name)
            return False, None
        if params.get("do_remote_prefill"):  # stopped before it was scheduled
            self._decline(params)
            return False, None
        if "kvpool_room" not in params:
            return False, None
        _, sent = self._streamed.pop(name, (request, 0))
        stop = self._total(request)
        if request.status.name not in DELIVERED or stop < 1:
            if sent:
                self._step.aborts.append(name)
            return False, None
        if sent < stop:
            self._send(request, blocks, sent, stop)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": params["kvpool_room"],
            "remote_addresses": list(self._addresses),
            "remote_num_tokens": stop,
            "remote_prompt": prompt_digest(request, stop),
        }


def prompt_digest(request: Any, tokens: int | None = None) -> str | None:
    """Of all prompt tokens but the last (of the first `tokens`): 16 hex digits. None for embeds."""
    ids = request.prompt_token_ids
    if ids is None:
        return None
    held = array("q", ids[: len(ids) - 1 if tokens is None else tokens])
    return hashlib.blake2b(held.tobytes(), digest_size=8).hexdigest()


def _source(params: dict[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """The room and its endpoint addresses; None if what a client sent is neither."""
    room, addresses = params.get("remote_request_id"), params.get("remote_addresses")
    if not isinstance(room, str) or not isinstance(addresses, (list, tuple)) or not addresses:
        return None
    return (room, tuple(addresses)) if all(isinstance(one, str) for one in addresses) else None


def _params(request: Any) -> dict[str, Any]:
    """kv_transfer_params; an empty dict where there are none."""
    params: dict[str, Any] | None = request.kv_transfer_params
    return {} if params is None else params
