"""Seeded faults with real engine processes: kills, aborts, leases that run out, restarts.

Every request ends, with the tokens of a single engine or, where the policy says so, with an error;
on every engine that lives all blocks come back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import Tokens
from tests.engines.vllm.engines import PREFILL, Engine, prompts

LENGTHS = (300, 77, 16, 513)
FAULTS = (
    "prefill killed before it is asked",
    "prefill killed while it is read",
    "prefill killed after it was read",
    "decode killed while it reads",
    "aborted on decode",
    "aborted on prefill",
    "lease out",
    "decode is busy",
)
LEASE = 3.0
RUNS = {"local": 32, "nixl": 16, "mooncake": 16}


class World:
    """Two engines; who was killed is started again, prefill at the same address."""

    def __init__(self, start: Callable[..., Engine], engine: str, address: str) -> None:
        self._start, self.engine, self.address = start, engine, address
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        self.prefill.ready(), self.decode.ready()

    def start(self, role: str) -> Engine:
        """Another one."""
        extra: dict[str, Any] = {"engine": self.engine, "lease": LEASE}
        if role == "prefill":
            extra["bind"] = self.address
        return self._start(role, "llama", extra=extra, policy="recompute", block_size=32)

    def revive(self) -> None:
        """Starts who was killed."""
        if self.prefill.process.poll() is not None:
            self.prefill = self.start("prefill").ready()
        if self.decode.process.poll() is not None:
            self.decode = self.start("decode").ready()


@pytest.fixture(params=RUNS)
def world(
    request: pytest.FixtureRequest, start: Callable[..., Engine], tmp_path: Path
) -> Iterator[World]:
    """Engines over each of the three."""
    yield World(start, request.param, f"ipc://{tmp_path}/prefill")


def test_faults(world: World, expected: Callable[..., Tokens]) -> None:
    wanted = expected("llama")
    for seed in range(RUNS[world.engine]):
        fault = FAULTS[seed % len(FAULTS)]
        try:
            run(world, fault, random.Random(seed), wanted)
        except BaseException as error:
            raise AssertionError(f"{world.engine}, seed {seed}: {fault}") from error
        world.revive()


def run(world: World, fault: str, source: random.Random, wanted: Tokens) -> None:
    """One fault among four requests."""
    asked = prompts(*LENGTHS)
    prefill, decode = world.prefill, world.decode
    if fault == "aborted on prefill":
        names = [prefill.add(prompt, tokens=1, params=dict(PREFILL)) for prompt in asked]
        time.sleep(source.uniform(0, 0.2))
        victim = source.choice(names)
        prefill.send(do="abort", id=victim)
        alive = [at for at, name in enumerate(names) if name != victim]
        params = {at: prefill.finished(names[at])["params"] for at in alive}
        asked = [asked[at] for at in alive]
        wanted = [wanted[at] for at in alive]
        given = [params[at] for at in alive]
    else:
        done = prefill.generate(asked, tokens=1, params=[dict(PREFILL) for _ in asked])
        given = [one["params"] for one in done]
    if fault == "prefill killed before it is asked":
        prefill.kill()
    if fault == "lease out":
        prefill.idle(LEASE + 10)
    names = [decode.add(prompt, params=one) for prompt, one in zip(asked, given)]
    victims: list[str] = []
    if fault == "prefill killed while it is read":
        time.sleep(source.uniform(0, 0.05))
        prefill.kill()
    if fault == "decode killed while it reads":
        time.sleep(source.uniform(0, 0.05))
        decode.kill()
        prefill.idle()
        return
    if fault == "aborted on decode":
        time.sleep(source.uniform(0, 0.05))
        victims = source.sample(names, 2)
        for name in victims:
            decode.send(do="abort", id=name)
    if fault == "decode is busy":
        decode.send(do="busy", seconds=LEASE + 1)
    if fault == "prefill killed after it was read":
        decode.event("first", id=names[0])
        prefill.kill()
    for name, tokens in zip(names, wanted):
        if name not in victims:
            assert decode.finished(name)["tokens"] == [tokens], name
    decode.idle()
    if prefill.process.poll() is None:
        prefill.idle(LEASE + 10)
