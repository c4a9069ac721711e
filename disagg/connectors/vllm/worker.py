"""The connector's half in vLLM's workers: one rank's endpoints, driven by the engine's own steps.

Nothing here waits: `begin`, `save` and `results` turn each endpoint while it has something to do. A
thread turns them where the engine does not: in a long forward pass, or while it is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from disagg.connectors.vllm.layout import EngineLayout
from disagg.connectors.vllm.scheduler import Blocks, Decline, Receive, Send, Step
from disagg.connectors.vllm.settings import Settings
from disagg.connectors.vllm.stats import Stats
from disagg.engines.base import create_engine
from disagg.protocol.decode_state import Link
from disagg.protocol.messages import Room
from disagg.protocol.status import Failure
from disagg.runtime.decode_endpoint import DecodeEndpoint
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.device import get_device
from kvpool.layout import RequestAddress, Span

log = logging.getLogger("vllm.kvpool")

E = TypeVar("E")

TURN_SECONDS = 0.005
"""The longest time between two turns of an endpoint, while Python's lock is free."""
BUSY_SECONDS = 0.001
"""How long an endpoint that says that it has more to do may keep the engine from its next step."""


@dataclass(slots=True)
class Results:
    """Requests whose blocks may be reused (`sent`), that have arrived or failed (`received`), and
    those of them that failed.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class _Receiving(NamedTuple):
    request: str
    aborted: bool


class Worker:
    """Offers what this rank's engine computes (`produces`) and reads what it needs (`consumes`).

    `ranks` ranks of this engine read each room.
    """

    def __init__(
        self,
        settings: Settings,
        layout: EngineLayout,
        *,
        produces: bool,
        consumes: bool,
        ranks: int,
    ) -> None:
        self._layout, self.stats = layout, Stats()
        self.prefill: PrefillEndpoint | None = None
        self.decode: DecodeEndpoint | None = None
        if produces:
            self.prefill = PrefillEndpoint(
                layout.layout,
                create_engine(settings.engine),
                settings.bind,
                lease=settings.lease,
                **settings.options,
            )
        if consumes:
            self.decode = DecodeEndpoint(
                layout.layout,
                create_engine(settings.engine),
                ranks=ranks,
                verify=settings.verify,
                offer_timeout=settings.offer_timeout,
                **settings.options,
            )
        self._endpoints = [each for each in (self.prefill, self.decode) if each is not None]
        memory = next(iter(layout.layout.buffers)).memory
        self._device = None if memory == "cpu" else get_device(memory.partition(":")[0])
        self._links: dict[tuple[str, ...], Link] = {}
        self._sending: dict[Room, str] = {}
        self._receiving: dict[Room, _Receiving] = {}
        self._results = Results()
        self._refusals: set[str] = set()
        self._turning, self._turned = threading.Lock(), 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._turn_meanwhile, name="kvpool", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Asks for what requests need of prefill."""
        for receive in step.receives:
            self._receive(receive)
        for decline in step.declines:
            self._decline(decline)
        self.turn()

    def save(self, step: Step) -> None:
        """Offers what was computed, after the work that the device was given for it."""
        for name in step.aborts:
            self._abort(name)
        for send in step.sends:
            self._send(send)
        self.turn()

    def results(self) -> Results:
        """What has ended since the last call."""
        self.turn()
        if self.prefill is not None:
            for room, _, failure in self.prefill.ended():
                request = self._sending.pop(room, None)
                if request is not None:
                    self._results.sent.add(request)
                self.stats.sent(failure)
                self.prefill.forget(room)
            refusals = self.prefill.refusals()
            for reason in dict.fromkeys(refusals):
                if reason not in self._refusals:
                    log.error("a decode engine cannot read from here: %s", reason)
            self._refusals = set(refusals)
        if self.decode is not None:
            for room, _, failure in self.decode.ended():
                self._received(self.decode, room, failure)
        results, self._results = self._results, Results()
        return results

    def turn(self) -> None:
        """Lets both endpoints do what there is to do now."""
        with self._turning:
            for endpoint in self._endpoints:
                until = time.monotonic() + BUSY_SECONDS
                while endpoint.step() and time.monotonic() < until:
                    pass
            self._turned = time.monotonic()

    def close(self) -> None:
        """Aborts what is open, tells peers and closes the engines."""
        self._closed.set()
        self._thread.join()
        for endpoint in self._endpoints:
            endpoint.close()

    def _turn_meanwhile(self) -> None:
        while not self._closed.wait(TURN_SECONDS):
            if time.monotonic() - self._turned > TURN_SECONDS:
                self.turn()

    def _send(self, send: Send) -> None:
        prefill = _needed(self.prefill, "kv_producer")
        self._sending[send.room] = send.request
        try:
            prefill.send(
                send.room,
                self.block_table(send.blocks, send.stop),
                tokens=range(send.start, send.stop),
                last=send.last,
                after=self._device.record() if self._device is not None else None,
            )
        except ValueError as error:  # this request's blocks come back, and all others go on
            log.error("request %s cannot be handed over: %s", send.request, error)
            self._sending.pop(send.room)
            self._results.sent.add(send.request)

    def _receive(self, receive: Receive) -> None:
        decode = _needed(self.decode, "kv_consumer")
        try:
            decode.receive(
                receive.room,
                self.block_table(receive.blocks, receive.stop),
                start=receive.start,
                link=self._link(receive.addresses),
            )
        except ValueError as error:
            log.error("request %s cannot be received: %s", receive.request, error)
            self._results.received.add(receive.request)
            self._results.failed.add(receive.request)
            return
        self._receiving[receive.room] = _Receiving(receive.request, False)

    def _decline(self, decline: Decline) -> None:
        decode = _needed(self.decode, "kv_consumer")
        try:
            decode.decline(decline.room, self._link(decline.addresses))
        except ValueError as error:
            log.warning("room %s ends with prefill's lease: %s", decline.room, error)

    def _link(self, addresses: tuple[str, ...]) -> Link:
        decode = _needed(self.decode, "kv_consumer")
        link = self._links.get(addresses)
        if link is None:
            link = self._links[addresses] = decode.connect(addresses)
        return link

    def _abort(self, request: str) -> None:
        reason = "the request was aborted or preempted."
        for room, receiving in self._receiving.items():
            if receiving.request == request and self.decode is not None:
                self._receiving[room] = _Receiving(request, True)
                self.decode.abort(room, reason)
        for room, name in list(self._sending.items()):
            if name == request and self.prefill is not None:
                del self._sending[room]
                self.prefill.abort(room, reason)

    def _received(self, decode: DecodeEndpoint, room: Room, failure: Failure | None) -> None:
        receiving = self._receiving.pop(room, None)
        if receiving is not None:
            self._results.received.add(receiving.request)
            if failure and not receiving.aborted:
                self._results.failed.add(receiving.request)
                log.error("request %s was not received: %s", receiving.request, failure)
            metrics = decode.metrics(room)
            log.debug("request %s: %s", receiving.request, metrics)
            self.stats.received(metrics, failure)
        decode.forget(room)

    def block_table(self, blocks: Blocks, tokens: int) -> RequestAddress:
        """vLLM's block ids of every group as a block table of `tokens` positions."""
        spans: dict[str, Span] = {}
        for group, ids in zip(self._layout.groups, blocks):
            held = np.asarray(ids, dtype=np.int64)
            if not group.space:  # no layer of it is on this stage
                continue
            if group.state is not None:
                at = 0 if group.state == "first" else (tokens - 1) // group.tokens
                held = held[at : at + 1]
                spans[group.space] = Span(held[held != 0] * group.blocks)
                continue
            held = held[: -(-tokens // group.tokens)]
            if group.blocks > 1:
                within = np.arange(group.blocks)
                held = np.where(held[:, None], held[:, None] * group.blocks + within, 0).ravel()
            spans[group.space] = Span.from_blocks(held, null=0)
        return RequestAddress(tokens, spans)


def _needed(endpoint: E | None, role: str) -> E:
    """The endpoint of a role. The scheduler's half asks only for roles that the engine has."""
    if endpoint is None:
        raise ValueError(f"this engine is no {role}. Start it with kv_role {role}, or kv_both.")
    return endpoint
