"""One rank of a serving engine: its endpoints, and the rooms of its requests.

Nothing here waits but `wait`, `wait_layer` and `wait_for_end`. The endpoints have threads. The
engine's own calls take turns too: while its main thread runs Python, theirs get the GIL late.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from disagg.connectors.rank.end import end
from disagg.connectors.rank.links import Links
from disagg.connectors.rank.producing import prefill_endpoint
from disagg.connectors.rank.results import Results
from disagg.connectors.rank.stats import Stats
from disagg.connectors.settings import Settings
from disagg.errors import UnknownRoom, UsageError
from disagg.host.signals import deferred_signals
from disagg.protocol.codec import Aux
from disagg.protocol.messages import Convention, Room, room_name
from disagg.protocol.peers.link import Link
from disagg.protocol.status import Ended, Failure, KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.device import Event, get_device
from kvpool.layout import PoolLayout, RequestAddress

LayerId = tuple[str, int]
"""Owner and number of a layer, as layouts have them."""
BUSY_SECONDS = 0.001
"""How long an endpoint that says that it has more to do may keep the engine from its next step."""
ABORTED = "the request was aborted or preempted."
EXPECTED = (ValueError, UsageError)
"""Errors of a caller or a peer: others are logged with their traceback."""


@dataclass(slots=True)
class _Sending:
    """A room of prefill, and whether the engine has `finished` its request."""

    request: str
    ended: bool = False
    finished: bool = False
    failure: Failure | None = None


@dataclass(slots=True)
class _Receiving:
    """A room of decode. An aborted one is not called failed."""

    request: str
    link: Link
    aborted: bool = False


class Rank:
    """Offers what this rank computes (`produces`), reads what it needs (`consumes`). `readers`
    ranks of this engine read each room. `log` is the engine's, which takes `stats` too.
    `conventions`: what its bytes mean beside their layout. `number`: of this rank among all of the
    engine's, its replicas included; each has a port of its own.
    """

    def __init__(
        self,
        settings: Settings,
        layout: PoolLayout,
        *,
        produces: bool,
        consumes: bool,
        readers: int,
        log: logging.Logger,
        conventions: Mapping[str, Convention],
        number: int = 0,
    ) -> None:
        self.layout, self.stats, self._log = layout, Stats(number), log
        self._drain_seconds = settings.drain_seconds
        options, alone = settings.options(conventions), not consumes
        self._prefill: PrefillEndpoint | None = None
        self._links: Links | None = None
        self._endpoints: list[PrefillEndpoint | DecodeEndpoint] = []
        if produces:
            self._prefill = prefill_endpoint(settings, layout, options, number=number, alone=alone)
            self.layout = self._prefill.layout
            self._endpoints.append(self._prefill)
            self.stats.watch_endpoint("prefill", self._prefill.snapshot)
        if consumes:
            decode = DecodeEndpoint(
                layout,
                settings.new_engine(),
                ranks=readers,
                verify=settings.verify,
                offer_timeout=settings.offer_timeout,
                allow_missing=settings.allow_missing,
                cast=settings.cast,
                **options,
            )
            self._links = Links(decode)
            self._endpoints.append(decode)
            self.stats.watch_endpoint("decode", decode.snapshot)
        memory = layout.buffers[0].memory
        self._device = None if memory == "cpu" else get_device(memory.partition(":")[0])
        self._sending: dict[Room, _Sending] = {}
        self._receiving: dict[Room, _Receiving] = {}
        self._results = Results()
        self._has_all = True
        """Whether no prefill has lacked what it may, so far."""
        self._ended: deque[tuple[PrefillEndpoint | DecodeEndpoint, Ended]] = deque()
        """What the endpoints list no more, and `results` has not told."""

    @property
    def prefill(self) -> PrefillEndpoint:
        """Raises ValueError if this engine was not started for prefill."""
        if self._prefill is None:
            raise ValueError("this engine was not started for prefill.")
        return self._prefill

    @property
    def address(self) -> str | None:
        """What decode engines dial; None if this engine was not started for prefill."""
        return None if self._prefill is None else self._prefill.address

    @property
    def links(self) -> Links:
        """To prefills. Raises ValueError if this engine was not started for decode."""
        if self._links is None:
            raise ValueError("this engine was not started for decode.")
        return self._links

    @property
    def decode(self) -> DecodeEndpoint:
        """Raises ValueError if this engine was not started for decode."""
        return self.links.decode

    def expect(self, request: str, room: Room) -> None:
        """The engine will send a request: `results` tells of its room. Raises RoomError."""
        self._sending.setdefault(room_name(room), _Sending(request))

    def asked(self, room: Room) -> bool:
        """Whether a decode engine has asked for a room."""
        with suppress(UnknownRoom):
            return self.prefill.poll(room) is not KVPoll.Bootstrapping
        return False

    def send(
        self,
        request: str,
        room: Room,
        table: RequestAddress,
        tokens: range,
        *,
        last: bool,
        layer: LayerId | None = None,
        aux: Aux | None = None,
        after: Event | None = None,
    ) -> None:
        """Offers positions `tokens` of a request, of a layer or of all, once the device has done
        the work before `after` (None: that it was given so far). Of a room that has ended nothing
        is offered any more. Raises ValueError; `not_sent` is for that.
        """
        prefill = self.prefill
        if self._sending.setdefault(room, _Sending(request)).ended:
            return
        if after is None and self._device is not None:
            after = self._device.record()
        owner, number = layer or ("target", 0)
        only = None if layer is None else range(number, number + 1)
        prefill.send(
            room, table, tokens=tokens, last=last, aux=aux, after=after, owner=owner, layers=only
        )

    def not_sent(self, request: str, room: Room, why: Exception) -> None:
        """A request cannot be offered: its pages come back, and all others go on."""
        reason = f"it cannot be handed over: {why}"
        sending = self._sending.setdefault(room, _Sending(request))
        sending.ended, sending.failure = True, Failure("prefill", reason, "abort")
        with self._contained(room):
            self.prefill.reject(room, reason)
        traceback = not isinstance(why, EXPECTED)
        self._log.error("request %s cannot be handed over: %s", request, why, exc_info=traceback)

    def receive(
        self,
        request: str,
        room: Room,
        table: RequestAddress,
        *,
        start: int,
        peers: tuple[str, ...],
        aux: Collection[str] = (),
        traceparent: str | None = None,
    ) -> None:
        """Asks `peers` for positions from `start` on, and `aux`. ValueError: see `not_received`."""
        link = self.links.to(peers)
        self.decode.receive(room, table, start=start, link=link, aux=aux, traceparent=traceparent)
        self._receiving[room] = _Receiving(request, link)

    def not_received(self, request: str, why: Exception) -> None:
        """A request cannot be asked for: it has failed, and all others go on."""
        self._results.received.add(request)
        self._results.failed.add(request)
        traceback = not isinstance(why, EXPECTED)
        self._log.error("request %s cannot be received: %s", request, why, exc_info=traceback)

    def decline(self, room: Room, peers: tuple[str, ...]) -> None:
        """Gives prefill its pages back: nothing of the room is needed."""
        with self._contained(room, "prefill's pages come back with its lease"):
            self.decode.decline(room, self.links.to(peers))

    def drop(self, room: Room, peers: tuple[str, ...]) -> None:
        """Ends a room that was not asked for on prefill too. Raises ValueError."""
        self.decode.decline(room, self.links.to(peers))
        self.decode.abort(room, ABORTED)

    def abort(self, request: str) -> None:
        """Ends the rooms of a request, which `results` does not call failed."""
        for room, receiving in self._receiving.items():
            if receiving.request == request:
                receiving.aborted = True
                with self._contained(room):
                    self.decode.abort(room, ABORTED)
        rooms = [room for room, sending in self._sending.items() if sending.request == request]
        for room in rooms:
            if not self._sending.pop(room).ended:
                with self._contained(room):
                    self.prefill.reject(room, ABORTED)

    def wait_layer(self, room: Room, layer: LayerId) -> None:
        """Waits until a layer of a room has come, or the room has failed."""
        owner, number = layer
        if room in self._receiving:
            self.decode.wait_layer(room, number, owner=owner)

    def wait(self, room: Room) -> None:
        """Waits until a room has ended."""
        if room in self._receiving:
            self.decode.wait(room)

    def results(self, finished: Collection[str]) -> Results:
        """What has ended since the last call, in which the engine has `finished` these requests. A
        room that ends before its request is computed is told when the engine has finished that too.
        """
        self.turn()
        if telling := [end for end in self._endpoints if end.has_ended or self._has_rooms(end)]:
            with deferred_signals:  # what a handler raises comes when the lists are in ours
                for endpoint in telling:
                    self._ended.extend((endpoint, ended) for ended in endpoint.ended())
        self._take_ended()
        for room, sending in list(self._sending.items()):
            sending.finished |= sending.request in finished
            if sending.finished and sending.ended:
                del self._sending[room]
                self._results.sent.add(sending.request)
                if sending.failure:
                    self._results.why[sending.request] = sending.failure
        if self._links is not None:
            self._links.close_unused({receiving.link for receiving in self._receiving.values()})
        results, self._results = self._results, Results()
        return results

    def wait_for_end(self, seconds: float) -> None:
        """Waits until a room has ended, for so long at most, if any is open."""
        self.turn()
        if self._ended or self._results.received:
            return
        if waiting := [endpoint for endpoint in self._endpoints if self._has_rooms(endpoint)]:
            ends = select.poll()
            for endpoint in waiting:
                ends.register(endpoint, select.POLLIN)
            ends.poll(1e3 * seconds)

    def turn(self) -> None:
        """Lets endpoints that have rooms of the engine's do what there is to do now. The threads of
        others have the time.
        """
        for endpoint in filter(self._has_rooms, self._endpoints):
            endpoint.driver.turn_for_caller(BUSY_SECONDS)

    def drain(self) -> None:
        """Takes no new rooms from now on."""
        for endpoint in self._endpoints:
            endpoint.drain()

    def close(self) -> None:
        """Ends what is open, the engine having stopped, and closes the endpoints."""
        end(self._endpoints, self._drain_seconds, self._log)

    def _has_rooms(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> bool:
        return bool(self._receiving if isinstance(endpoint, DecodeEndpoint) else self._sending)

    @contextmanager
    def _contained(self, room: Room, effect: str = "all others go on") -> Iterator[None]:
        """What goes wrong with one room is logged, and keeps nothing else from being done."""
        try:
            yield
        except Exception as error:
            traceback = not isinstance(error, EXPECTED)
            self._log.warning("error in room %r, %s: %s", room, effect, error, exc_info=traceback)

    def _take_ended(self) -> None:
        """Notes and forgets rooms that have ended. Each stays in the list until that is done, so
        that an exception in between, also one of a signal, loses none.
        """
        while self._ended:
            endpoint, (room, _, failure) = self._ended[0]
            with self._contained(room):
                self.stats.changed()
                if isinstance(endpoint, DecodeEndpoint):
                    self._received(room, failure)
                elif sending := self._sending.get(room):
                    sending.ended, sending.failure = True, failure
            with self._contained(room):
                endpoint.forget(room)
            self._ended.popleft()

    def _received(self, room: Room, failure: Failure | None) -> None:
        receiving = self._receiving.get(room)
        if receiving is None:  # a declined room
            return
        decode, request = self.decode, receiving.request
        if failure is None:
            try:
                self._results.aux[request] = decode.aux(room)
            except UsageError as error:
                failure = Failure("decode", f"its values are not there: {error}", "aux")
        if failure:
            self._results.why[request] = failure
            if not receiving.aborted:
                self._results.failed.add(request)
        self._results.received.add(request)
        del self._receiving[room]
        # from here on an error of the engine's log or counters loses nothing
        if request in self._results.failed:
            self._log.error("request %s was not received: %s", request, failure)
        plan = receiving.link.plan
        if plan is not None and plan.missing and self._has_all:
            self._has_all = False
            roles = ", ".join(dict.fromkeys(f"{owner} {role}" for owner, _, role in plan.missing))
            self._log.warning(
                "a prefill has no %s, and decode's stays as it is (allow_missing). Of a draft: few "
                "of its tokens are accepted until it has seen a request's own.",
                roles,
            )
        self._log.debug("request %s: %s", request, metrics := decode.metrics(room))
        self.stats.received(metrics, failure)
