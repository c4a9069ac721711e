"""Seeded runs of real engines between hosts: two prefills and a decode, requests on their way, and
a link that fails at a point that the seed chooses. Each request has a single engine's tokens or
fails with its reason, nothing stays held, and the link serves again without a call.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engines.pair import EXACT, LENGTHS
from tests.engines.process import EngineFailed
from tests.engines.sglang import engines as sglang
from tests.engines.vllm import engines as vllm
from tests.faults.world import Violation
from tests.hosts.links import ENGINES, WAYS, Link
from tests.hosts.network import Network
from tests.hosts.sides import Sides

RATE = "20mbit"
"""At which the state of all four prompts takes 1.5 s."""
LIMITS: dict[str, Any] = {"peer_timeout": 3.0, "lease": 8.0, "offer_timeout": 8.0}
BOUND = 60.0
"""Seconds for all that must end: far more than the limits, for engines on two busy cores."""
SECONDS = 0.3, 1.0, 3.0, 8.0
"""For which a link is down."""
VANISHES = "vanishes"
PREFILLS, DECODE = (0, 1), 2
"""Their hosts."""
BLOCK = 20
"""Runs over one transfer engine before the other has its turn."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What differs between serving engines."""

    engine: Callable[..., Any]
    options: dict[str, Any]
    ask: Callable[[Any, Any, list[list[int]]], tuple[list[str], list[str]]]
    """Asks both sides for prompts; names on prefill, where it still has to answer, and on decode.
    """
    tokens: Callable[[dict[str, Any]], list[int]]
    """Of a request's end; none if it failed."""
    reason: Callable[[Any, dict[str, Any]], str]
    """Why it failed on an engine."""
    kept: tuple[str, ...] = ()
    """Arguments that an engine has again when its host is back, by its attributes."""


def _ask_vllm(prefill: Any, decode: Any, asked: list[list[int]]) -> tuple[list[str], list[str]]:
    params = vllm.prefilled(prefill, asked)
    return [], [decode.add(prompt, params=one) for prompt, one in zip(asked, params)]


def _vllm_reason(engine: Any, ended: dict[str, Any]) -> str:
    """vLLM answers that there was an error; why is in its log."""
    text = engine.log.read_text(errors="replace")
    reasons = re.findall(rf"request {ended['id']}\b.* was not received: (.*)", text)
    return "".join(reasons[-1:])


WAITS = {f"SGLANG_DISAGGREGATION_{n}_TIMEOUT": "8" for n in ("BOOTSTRAP", "WAITING")}
KINDS = {
    "vllm": Kind(
        engine=vllm.Engine,
        options={"extra": LIMITS, "block_size": 32, **EXACT},
        ask=_ask_vllm,
        tokens=lambda ended: ended["tokens"][0] if ended["reason"] == ["length"] else [],
        reason=_vllm_reason,
    ),
    "sglang": Kind(
        engine=sglang.Engine,
        options={"extra": {"peer_timeout": LIMITS["peer_timeout"]}, "environ": WAITS, **EXACT},
        ask=sglang.asked,
        tokens=lambda ended: [] if sglang.failure(ended) else ended["tokens"],
        reason=lambda _, ended: sglang.failure(ended),
        kept=("port",),
    ),
}


class Fleet:
    """Three hosts and their engines, over one transfer engine."""

    def __init__(self, kind: Kind, moved_by: str) -> None:
        self.kind, self.moved_by = kind, moved_by
        self.network = Network(3)
        self._sides = Sides(self.network, kind.engine)
        self.prompts = vllm.prompts(*LENGTHS)
        try:
            single = self._sides.single("llama", **EXACT).ready()
            self.right = [kind.tokens(single.generate([prompt])[0]) for prompt in self.prompts]
            single.close()
            self.engines = {at: self._start(at) for at in (*PREFILLS, DECODE)}
            for engine in self.engines.values():
                engine.ready()
            for host in self.network.hosts:
                self.network.rate(host, RATE)
        except BaseException:
            self.close()
            raise

    @property
    def decode(self) -> Any:
        return self.engines[DECODE]

    def _start(self, at: int, **more: Any) -> Any:
        options = {**self.kind.options, **more}
        options["extra"] = {"engine": self.moved_by, **options["extra"]}
        return self._sides.start("decode" if at == DECODE else "prefill", "llama", at=at, **options)

    def revive(self, at: int) -> None:
        """A host is back, and its engine at the same address."""
        host = self.network.hosts[at]
        self.network.boot(host)
        self.network.rate(host, RATE)
        lost = self.engines[at]
        lost.close()
        kept = {name: getattr(lost, name) for name in self.kind.kept}
        self.engines[at] = self._start(at, **kept).ready()

    def close(self) -> None:
        """Ends the engines and the hosts."""
        self._sides.close()
        self.network.close()

    def ends(self, prefill: int, names: list[str], numbers: list[int]) -> list[str]:
        """Waits for requests of decode: the reason of each, empty if its tokens are right."""
        reasons = []
        for name, number in zip(names, numbers):
            ended = self.decode.finished(name, timeout=BOUND)
            tokens = self.kind.tokens(ended)
            reason = "" if tokens else self.kind.reason(self.decode, ended)
            assert tokens == self.right[number] or reason, f"{name} of host {prefill}: {ended}"
            reasons.append(reason)
        return reasons

    def recovers(self, prefill: int) -> None:
        """A request of a prefill is right again."""
        until = time.monotonic() + BOUND
        while True:
            first, last = self.kind.ask(self.engines[prefill], self.decode, self.prompts[1:2])
            reasons = self.ends(prefill, last, [1])
            for name in first:
                self.engines[prefill].finished(name, timeout=BOUND)
            if not any(reasons):
                return
            assert time.monotonic() < until, f"host {prefill} serves no more: {reasons}"


class Runs:
    """Makes runs of a kind; engines live until a run over the other transfer engine, or one that
    failed.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._fleet = KINDS[kind], None

    def run(self, seed: int) -> str:
        """Makes one run, and says how it went. Raises Violation."""
        moved_by = ENGINES[seed // BLOCK % len(ENGINES)]
        if self._fleet is None or self._fleet.moved_by != moved_by:
            self.close()
            self._fleet = Fleet(self._kind, moved_by)
        try:
            return one(self._fleet, random.Random(seed))
        except (AssertionError, EngineFailed) as broken:
            self.close()
            raise Violation(f"seed {seed} over {moved_by}: {broken}") from broken

    def close(self) -> None:
        """Ends engines and hosts."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()


def one(fleet: Fleet, pick: random.Random) -> str:
    """One run."""
    victim = pick.choice((*PREFILLS, DECODE))
    # a host that vanishes costs the start of an engine, seconds of both cores
    way = VANISHES if pick.random() < 0.1 else pick.choice(WAYS)
    seconds = pick.choice(SECONDS)
    numbers = {at: pick.choices(range(len(LENGTHS)), k=pick.randrange(1, 5)) for at in PREFILLS}
    names = {
        at: fleet.kind.ask(fleet.engines[at], fleet.decode, [fleet.prompts[n] for n in numbers[at]])
        for at in PREFILLS
    }
    time.sleep(pick.uniform(0, 1))  # the moment
    link = Link(fleet.network, fleet.network.hosts[victim])
    if way == VANISHES:
        fleet.network.vanish(link.host)
    else:
        link.cut(way)
    time.sleep(seconds)
    lost_decode = way == VANISHES and victim == DECODE
    reasons: list[str] = []
    if way == VANISHES:
        if not lost_decode:
            reasons = _all_end(fleet, victim, names, numbers)
        fleet.revive(victim)
    else:
        link.mend(way)
        reasons = _all_end(fleet, victim, names, numbers)
    for at in PREFILLS:
        if way != VANISHES or victim != at:
            for name in names[at][0]:
                fleet.engines[at].finished(name, timeout=BOUND)
    for engine in fleet.engines.values():
        engine.idle(BOUND)
    for at in PREFILLS:
        fleet.recovers(at)
    how = f"{fleet.moved_by} host {victim} {way} {seconds:g} s: "
    how += f"{reasons.count('')} of {len(reasons)} right"
    return "\n    ".join((how, *sorted({reason for reason in reasons if reason})))


def _all_end(fleet: Fleet, victim: int, names: Any, numbers: dict[int, list[int]]) -> list[str]:
    """Reasons of decode's requests; those that do not use the link are right."""
    reasons = []
    for at in PREFILLS:
        own = fleet.ends(at, names[at][1], numbers[at])
        assert victim in (at, DECODE) or not any(own), f"host {at} does not use the link: {own}"
        reasons += own
    return reasons
