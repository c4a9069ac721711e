"""Two prefills and two decodes are replaced one after another by engines with other weights, while
clients ask: each answer is that of one engine with the weights of its decode, and only those fail
whose engine was killed.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, product
from typing import Any

from examples.picker import groups, picks
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed
from tests.engines.vllm.engines import PREFILL, Engine, prompts
from tests.ports import free_port
from tests.processes import until

PLACES = "prefill 0", "decode 0", "prefill 1", "decode 1"
"""In the order in which they are replaced."""
BEFORE, AFTER = "llama", "llama_other_weights"
CLIENTS = 3
"""That ask whom the picker names; one more asks every pair in turn."""
TOKENS = 24
BOUND_SECONDS = 120


class Line:
    """An engine that several threads ask."""

    def __init__(self, engine: Engine, model: str, source: str) -> None:
        self.engine, self.model, self.source = engine, model, source
        self.killed, self.answered = False, 0
        self._asked: dict[str, Future[dict[str, Any] | None]] = {}
        self._lock, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def ready(self) -> Line:
        self.engine.ready()
        self._thread.start()
        return self

    def ask(self, prompt: list[int], **more: Any) -> dict[str, Any] | None:
        """The end of a request; None if its engine has ended."""
        with self._lock:
            if self._ended or self.killed:
                return None
            answer = self._asked[self.engine.add(prompt, **more)] = Future()
        return answer.result(BOUND_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                event = self.engine.event("finished", timeout=10 * BOUND_SECONDS)
                with self._lock:
                    self._asked.pop(event["id"]).set_result(event)
        except (EngineFailed, OSError):
            with self._lock:
                self._ended = True
                for answer in self._asked.values():
                    answer.set_result(None)

    def kill(self) -> None:
        with self._lock:
            self.killed = True
        self.engine.kill()
        self._thread.join()


class Fleet:
    """Engines by place, the picker's picks, and what became of requests since the last change."""

    def __init__(self, right: dict[str, list[list[int]]]) -> None:
        self.lines: dict[str, Line] = {}
        self.right, self.asked = right, prompts(*LENGTHS)
        self.counts: Counter[str] = Counter()
        self._lock, self._numbers = threading.Lock(), count()
        self.over = False

    def change(self, lines: dict[str, Line]) -> None:
        """The router hears of other servers."""
        by_source = {line.source: line for line in lines.values()}
        chosen = picks(groups([*by_source]), count())
        with self._lock:
            self.lines = lines
            self.answers: Counter[tuple[Line, Line]] = Counter()
            self.refusals: Counter[tuple[Line, Line]] = Counter()
            self._picks = ((by_source[p], by_source[d]) for _, p, d in chosen)

    def pairs(self) -> list[tuple[Line, Line]]:
        sides = [
            [line for place, line in self.lines.items() if place.startswith(side)]
            for side in ("prefill", "decode")
        ]
        return [*product(*sides)]

    def picked(self) -> tuple[Line, Line]:
        with self._lock:
            return next(self._picks)

    def served(self) -> bool:
        """Whether each pair has answered since the last change, or refused."""
        with self._lock:
            return all(
                (self.answers if fits(pair) else self.refusals)[pair] for pair in self.pairs()
            )

    def client(self, everywhere: bool) -> None:
        """Asks one request after the other."""
        turn = 0
        while not self.over:
            turn += 1
            with self._lock:
                number = next(self._numbers) % len(self.asked)
                pairs = self.pairs()
            pair = pairs[turn % len(pairs)] if everywhere else self.picked()
            self.count(asked=1)
            if self.request(number, pair) == "refused":
                # a router tries another pair
                assert self.request(number, self.picked()) != "refused"

    def request(self, number: int, pair: tuple[Line, Line]) -> str:
        """Asks a pair; what became of it."""
        prefill, decode = pair
        first = prefill.ask(self.asked[number], tokens=1, params=dict(PREFILL))
        params = first and first["params"]
        last = params and decode.ask(self.asked[number], tokens=TOKENS, params=params)
        if last and last["reason"] == ["length"]:
            assert fits(pair), f"{prefill.model} and {decode.model} were mixed"
            assert last["tokens"] == [self.right[decode.model][number]]
            with self._lock:
                self.answers[pair] += 1
                prefill.answered += 1
                decode.answered += 1
            self.count(answered=1)
            return "answered"
        if prefill.killed or decode.killed:
            self.count(killed=1)
            return "killed"
        assert last and last["reason"] == ["error"], last or first
        assert not fits(pair), decode.engine.tail()
        with self._lock:
            self.refusals[pair] += 1
        self.count(refused=1)
        return "refused"

    def count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)


def fits(pair: tuple[Line, Line]) -> bool:
    prefill, decode = pair
    return prefill.model == decode.model


def until_served(fleet: Fleet, clients: list[Future[None]]) -> None:
    def condition() -> bool:
        for client in clients:
            if client.done():  # it found something
                client.result()
        return fleet.served()

    until(condition, BOUND_SECONDS)


def test_engines_are_replaced_by_others_with_other_weights_under_load(start, expected):
    right = {model: expected(model, **EXACT) for model in (BEFORE, AFTER)}
    assert all(one != other for one, other in zip(right[BEFORE], right[AFTER]))

    def started(place: str, model: str) -> Line:
        port = free_port()
        extra = {"contract": f"127.0.0.1:{port}"}
        engine = start(place.split()[0], model, extra=extra, **EXACT)
        return Line(engine, model, f"http://127.0.0.1:{port}")

    fleet, replaced = Fleet(right), []
    lines = {place: started(place, BEFORE) for place in PLACES}
    fleet.change({place: line.ready() for place, line in lines.items()})
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        clients = [threads.submit(fleet.client, number == CLIENTS) for number in range(CLIENTS + 1)]
        try:
            until_served(fleet, clients)
            for place in PLACES:
                after = started(place, AFTER).ready()  # the others serve meanwhile
                replaced.append(fleet.lines[place])
                fleet.change(fleet.lines | {place: after})
                replaced[-1].kill()
                until_served(fleet, clients)
        finally:
            fleet.over = True
    for client in clients:
        client.result()
    live = [*fleet.lines.values()]
    # decode 0 as it was and prefill 0 as it is now met first: both name the difference
    for line in (replaced[1], live[0]):
        assert "weights: " in line.engine.log.read_text(errors="replace")
    for line in live:
        line.kill()
    assert all(line.answered for line in (*live, *replaced))
    counts = fleet.counts
    print(dict(counts))  # for docs/upgrade.md
    assert counts["asked"] == counts["answered"] + counts["killed"]
    assert counts["refused"]
