"""One endpoint in a process of its own, and a small scheduler that follows the rules for pages.

Orders come over a pipe, events go back over it. Prefill's pages are freed once `poll` says that a
room has ended, decode's once `reading` is false as well.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, UnknownRoom
from disagg.engines.base import create_engine
from disagg.protocol.messages import ReadDone, ReadRequest
from disagg.runtime.sockets.tls import open_keys
from kvpool.allocation.allocator import Request
from tests.faults.orders import Order, Setup
from tests.faults.stock import Stock, put, wrong
from tests.faults.trips import Trip, TrippedTransport
from tests.processes import stands_still

PR_SET_PDEATHSIG = 1
PREFIX_SALT = 500
"""Added to a request's salt for the positions that decode already holds."""


class FaultyChild:
    """The endpoint, its pool and its orders."""

    prefix_salt = PREFIX_SALT

    def __init__(self, pipe: Any, setup: Setup) -> None:
        self._pipe, self._speaking = pipe, threading.Lock()
        self._receives = setup.bind is None
        self.stock = self.filled(setup)
        layout = self.stock.pool.layout
        engine = setup.make() if setup.make else create_engine(setup.engine)
        engine.max_bytes = setup.max_bytes
        side = "decode" if self._receives else "prefill"
        credentials = None if setup.keys is None else open_keys(setup.keys, side)
        self.transport = TrippedTransport(engine, self._sending, os.getpid(), credentials)
        options = {"transport": self.transport, **setup.options}
        self.endpoint: Any
        if self._receives:
            self.endpoint = DecodeEndpoint(layout, engine, **options)
        else:
            self.endpoint = PrefillEndpoint(layout, engine, setup.bind, **options)
        self.links: dict[str, Any] = {}
        self.orders: dict[int, Order] = {}
        self.inner: deque[tuple[Any, ...]] = deque()
        self._attempts: dict[str, Order] = {}
        self._balanced, self._closed = 0.0, False
        logging.getLogger("disagg").addHandler(Errors(self.say))

    def filled(self, setup: Setup) -> Stock:
        return Stock(setup.pool(), setup.salts)

    def take(self, order: Order) -> Request | None:
        """Pages for an order; None if there are none now."""
        return self.stock.take(order.course.tokens, received=self._receives)

    def write(self, order: Order, positions: range) -> None:
        put(self.stock.pool, order.address, positions, order.course.salt)

    def run(self) -> None:
        """Until the order to close."""
        self.say("up", self.endpoint.layout.generation)
        while not self._closed:
            self._step()
            if self._pipe.poll(0.001 if self.orders else 0.02):
                self.inner.append(self._pipe.recv())
            while self.inner and not self._closed:
                name, *given = self.inner.popleft()
                getattr(self, f"do_{name}")(*given)

    def say(self, *event: Any) -> None:
        """Sends an event to the world, with the time; it is complete when this returns."""
        with self._speaking:
            self._pipe.send((time.monotonic(), *event))

    def do_order(self, order: Order) -> None:
        """Takes an order; it begins when there are pages, and no other room of that name."""
        course = order.course
        order.due = time.monotonic() + (course.wanted if self._receives else course.offered)
        self.orders[order.number] = order

    def do_connect(self, name: str, addresses: list[str]) -> None:
        self.links[name] = self.endpoint.connect(addresses)

    def do_reconnect(self, name: str, addresses: list[str]) -> None:
        self.endpoint.disconnect(self.links.pop(name))
        self.do_connect(name, addresses)

    def do_abort(self, number: int, reason: str) -> None:
        order = self.orders.get(number)
        if order is not None and order.asked:
            self.endpoint.abort(order.room, reason)

    def do_again(self, number: int) -> None:
        """Requests a room a second time: that must be refused, and change nothing."""
        order = self.orders.get(number)
        if order is None or not order.asked:
            return
        try:
            start, link = order.course.start, self.links[order.link]
            self.endpoint.receive(order.room, order.address, start=start, link=link)
        except ValueError as error:
            answer = str(error)
        else:
            answer = "nothing"
        if "exists already" not in answer:
            self.say("problem", f"room {order.room} was received twice, the answer was: {answer}")

    def do_double(self, part: float) -> None:
        """From now on sends this share of all messages twice."""
        self.transport.doubled = part

    def do_trip(self, point: str, count: int, pid: int, number: int) -> None:
        """When `point` is reached for the `count`-th time, stops or kills process `pid` (0: this
        one), and waits until that has happened.
        """

        def signalled() -> None:
            if pid:
                os.kill(pid, number)
                while not stands_still(pid):
                    time.sleep(0.0005)
                self.say("tripped")
            else:
                self.say("tripped")
                signal.pthread_kill(threading.get_ident(), number)  # not any thread of this process

        self.transport.trip = Trip(point, count, signalled)

    def do_trip_order(self, point: str, count: int, *order: Any) -> None:
        """When `point` is reached for the `count`-th time, executes an order."""

        def ordered() -> None:
            self.say("tripped")
            self.inner.append(order)

        self.transport.trip = Trip(point, count, ordered)

    def do_trip_abort(self, count: int, number: int, reason: str) -> None:
        """Aborts an order after the `count`-th read was posted and before the next."""

        def aborted() -> None:
            self.say("tripped")
            self.do_abort(number, reason)

        self.transport.trip = Trip("read after", count, aborted)

    def do_untrip(self) -> None:
        """Removes the trip; tells whether it was still pending."""
        pending, self.transport.trip, self.transport.doubled = self.transport.trip, None, 0.0
        self.say("untrip", pending is not None)

    def do_settled(self) -> None:
        """Tells the generations of all links that are ready."""
        ready = {name: link.hellos for name, link in self.links.items() if link.plan is not None}
        self.say("settled", {n: [h and h.generation for h in hs] for n, hs in ready.items()})

    def do_audit(self) -> None:
        """Checks every filler request, and tells what is held."""
        self.say("audit", self._end())

    def do_close(self) -> None:
        """Closes the endpoint, and tells what is held after that."""
        self.endpoint.close()
        self.transport.close()
        self.say("closed", self._end())
        self._closed = True

    def _end(self) -> dict[str, Any]:
        lists = self.stock.audit()
        if not self.orders:  # no attempt goes on
            self._attempts.clear()
        return {
            "problems": self.stock.problems,
            "items": lists,
            "leases": self.endpoint.leases(),
            "orders": [order.room for order in self.orders.values()],
        }

    def _step(self) -> None:
        now = time.monotonic()
        serve = self._fetch if self._receives else self._offer
        for order in list(self.orders.values()):
            if serve(order, now):
                del self.orders[order.number]
        if now - self._balanced > 0.02:
            self._balanced = now
            self._balance()

    def _begun(self, order: Order, now: float) -> bool:
        """Whether the order has its pages; it waits for others of its name, and for room."""
        if order.request is None:
            others = (each for each in self.orders.values() if each.room == order.room)
            if now < order.due or next(others) is not order:
                return False
            order.request = self.take(order)
            if order.request is None:
                return False
            order.address = order.request.address()
        return True

    def _offer(self, order: Order, now: float) -> bool:
        """Prefill's side of one order, one step; whether it is over."""
        if not self._begun(order, now):
            return False
        course = order.course
        # a room that this side has not sent is known once a decode has asked for it
        state = KVPoll.Bootstrapping
        with suppress(UnknownRoom):
            state = self.endpoint.poll(order.room)
        edges = (0, *course.stops, course.tokens)
        if order.chunks < len(edges) - 1 and now >= order.due and not state.ended:
            start, stop = edges[order.chunks : order.chunks + 2]
            self.write(order, range(start, stop))
            last = stop == course.tokens
            self.endpoint.send(order.room, order.address, tokens=range(start, stop), last=last)
            order.asked = True
            order.chunks, order.due = order.chunks + 1, now + course.gap
            state = self.endpoint.poll(order.room)
        if not state.ended:
            if state is not KVPoll.Bootstrapping and not order.wanted:
                order.wanted = True
                self.say("begun", order.number)
            return False
        self._say_ended(order, state)
        self._give_back(order)
        return True

    def _fetch(self, order: Order, now: float) -> bool:
        """Decode's side of one order, one step; whether it is over and its pages are back."""
        if not self._begun(order, now):
            return False
        if not order.asked:
            start, salt = order.course.start, order.course.salt + self.prefix_salt
            put(self.stock.pool, order.address, range(start), salt)
            link = self.links[order.link]
            order.asked = True  # before the request is sent: see `_sending`
            self.endpoint.receive(order.room, order.address, start=start, link=link)
            self.say("begun", order.number)
        state = self.endpoint.poll(order.room)
        if state.ended and not order.ended:
            order.ended = True
            self._say_ended(order, state, self._wrong(order) if state is KVPoll.Success else 0)
        if not order.ended or self.endpoint.reading(order.room):
            return False
        self._give_back(order)
        return True

    def _say_ended(self, order: Order, state: KVPoll, count: int = 0) -> None:
        failure = self.endpoint.failure(order.room)
        self.say("ended", order.number, state, str(failure or ""), count)

    def _give_back(self, order: Order) -> None:
        self.endpoint.forget(order.room)
        self.stock.give_back(order.request)
        self.say("back", order.number)

    def _wrong(self, order: Order) -> int:
        pool, address, course = self.stock.pool, order.address, order.course
        count = wrong(pool, address, range(course.start, course.tokens), course.salt)
        return count + wrong(pool, address, range(course.start), course.salt + self.prefix_salt)

    def _sending(self, message: Any) -> None:
        """Before decode sends ReadDone, all bytes must be there."""
        if isinstance(message, ReadRequest):
            asked = [each for each in [*self.orders.values()] if each.asked and not each.ended]
            for order in asked:
                if order.room == message.room:
                    self._attempts[message.attempt] = order
        elif isinstance(message, ReadDone):
            order = self._attempts[message.attempt]
            room = self.endpoint.machine.rooms.by_name.get(message.room)
            # a room that has failed meanwhile may have lost its pages to another request
            alive = room and room.attempt == message.attempt and room.failure is None
            self.say("done", order.number, self._wrong(order) if alive else 0)

    def _balance(self) -> None:
        """Endpoint and scheduler must agree on what is leased."""
        before = self._held()
        leases = self.endpoint.leases()
        if before == self._held() and before != (leases.leased, leases.quarantined):
            self.say("problem", f"the scheduler holds {before}, the endpoint {leases}.")

    def _held(self) -> tuple[dict[str, int], dict[str, int]]:
        """Items of open rooms, and of ended rooms that are still being read, by id list."""
        found: tuple[dict[str, int], dict[str, int]] = {}, {}
        for order in self.orders.values():
            if order.asked and order.address is not None:
                ended = self.endpoint.poll(order.room).ended
                if ended and not (self._receives and self.endpoint.reading(order.room)):
                    continue
                for name, span in order.address.spans.items():
                    found[ended][name] = found[ended].get(name, 0) + span.ids.size
        return found


class Errors(logging.Handler):
    """Reports every error that the endpoint logs: there should be none."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("problem", self.format(record))


def main(pipe: Any, setup: Setup, child: type[FaultyChild]) -> None:
    """The process. It dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(setup.environment)
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        child(pipe, setup).run()
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the parent is gone
    except BaseException:
        pipe.send((time.monotonic(), "problem", traceback.format_exc()))
        raise
