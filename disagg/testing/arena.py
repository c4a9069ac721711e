"""Runs pairs of real serving engines on this machine, and notes the outcome of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from typing_extensions import Self

from disagg.testing import reasons
from disagg.testing.connectors import CONNECTORS, Place, modules
from disagg.testing.installed import CannotRun, Installed
from disagg.testing.judge import Answers, Observation
from disagg.testing.launch import Launch, Role, save_plugins
from disagg.testing.protocols import (
    Prompt,
    Servers,
    ask_sglang,
    ask_vllm,
    tokens_of_vllm,
)
from disagg.testing.servers import POLL, EngineServer, RequestFailed, ServerEnded, free_ports
from disagg.testing.state import rows
from disagg.testing.suite import Pair, ServerSettings, Suite

START, ANSWER = 600.0, 120.0
"""Seconds that a server has to start, and a request to be answered."""
ENDS = 3.0
"""Seconds in which a server is gone that has answered a last time."""
ALONE = "alone.json"
"""In an arena's folder: what single engines have answered, kept for the next time."""
FIRST = 24
"""Tokens of a pair's first prompt, which is not judged."""
PORTS = 16
"""Ports that a server of a pair may listen at: its own first, then its connector's."""


class Arena:
    """Servers of a suite, their logs in a folder. Every server has ended when it is left; so it
    is on SIGTERM, if it was entered in the main thread.
    """

    def __init__(self, suite: Suite, folder: Path, progress: Callable[[str], None]) -> None:
        self.suite, self.folder, self.progress = suite, folder, progress
        self.plugins = save_plugins(folder / "plugins")
        self._open = contextlib.ExitStack()
        self.installed = Installed(suite, folder, plugins=self.plugins, progress=progress)
        kept = folder / ALONE
        self._answered: dict[str, Answers] = json.loads(kept.read_text()) if kept.exists() else {}
        self._failed: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _leave)
            self._open.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def observe(self, pair: Pair) -> Observation:
        """Runs a pair with servers of its own. What its single engines answer is asked once for a
        folder, and not for a pair that is refused.
        """
        versions: dict[str, str] = {}
        observation = Observation()
        try:
            for engine in dict.fromkeys((pair.prefill.engine, pair.decode.engine)):
                versions |= self.installed.versions(engine, modules(pair, engine))
            observation = self._run(pair)
            if observation.here is None and observation.refused is None:
                alone = [self._answers(pair, side) for side in (pair.prefill, pair.decode)]
                observation = dataclasses.replace(
                    observation, alone_prefill=alone[0], alone_decode=alone[1]
                )
        except CannotRun as problem:
            if not any(observation.tokens or ()):  # what served needs no single engine
                observation = Observation(here=str(problem))
        return dataclasses.replace(observation, versions=versions)

    # single engines

    def _answers(self, pair: Pair, side: ServerSettings) -> Answers:
        """Of a single engine with a side's ranks. Pages and stages change no number. Raises
        CannotRun.
        """
        side = dataclasses.replace(side, pp=1)
        args = {name: value for name, value in side.args.items() if name != "kv_transfer_config"}
        question = {
            "side": dataclasses.asdict(dataclasses.replace(side, block_size=0, args=args)),
            "models": [self.suite.models.get(name or "") for name in (pair.model, side.draft)],
            "prompts": [pair.prompts, pair.new_tokens],
            "versions": self.installed.versions(side.engine, ()),
        }
        key = json.dumps(question, sort_keys=True)
        if key not in self._answered and key not in self._failed:
            self.progress(f"{pair.name}: {side.engine} alone")
            try:
                self._answered[key] = self._ask_alone(pair, side)
                (self.folder / ALONE).write_text(json.dumps(self._answered))
            except (ServerEnded, TimeoutError, RequestFailed) as problem:
                self._failed[key] = f"{side.engine} alone: {self._told(problem)}"
        if key in self._failed:
            raise CannotRun(self._failed[key])
        return tuple(tuple(tokens) for tokens in self._answered[key])

    def _ask_alone(self, pair: Pair, side: ServerSettings) -> Answers:
        with self._single(pair, side) as server:
            server.ready(START)
            return tuple(self._ask(server, side, prompt) for prompt in self._prompts(pair))

    def _ask(self, server: EngineServer, side: ServerSettings, prompt: Prompt) -> tuple[int, ...]:
        if side.engine == "vllm":
            return tokens_of_vllm(ask_vllm(server, prompt))
        return ask_sglang(server, prompt)

    def _starts_alone(self, pair: Pair, side: ServerSettings) -> None:
        """Raises CannotRun if an engine does not start with a side's settings and no connector."""
        self.progress(f"{pair.name}: {side.engine} alone, whether it starts")
        try:
            with self._single(pair, side) as server:
                server.ready(START)
        except (ServerEnded, TimeoutError) as problem:
            raise CannotRun(f"{side.engine} alone: {self._told(problem)}") from None

    def _told(self, problem: Exception) -> str:
        if isinstance(problem, ServerEnded):
            return f"{problem} {reasons.of_start(problem.server.text())}"
        return str(problem)

    # pairs

    def _run(self, pair: Pair) -> Observation:
        watch = self.folder / "state" / str(next(self._numbers))
        watch.mkdir(parents=True)
        self.progress(f"{pair.name}: starts")
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, watch, ignore_errors=True)
            port = free_ports(2 * PORTS)
            prefill = self._server(pair, Place(role="prefill", port=port + 1, folder=watch))
            started = [stack.enter_context(prefill)]
            decode = self._server(pair, Place(role="decode", port=port + PORTS + 1, folder=watch))
            started.append(stack.enter_context(decode))
            try:
                for server in started:
                    server.ready(START, beside=started)
            except ServerEnded as problem:
                return self._not_started(pair, problem, stack)
            except TimeoutError as problem:
                return Observation(refused=str(problem))
            self.progress(f"{pair.name}: hands over")
            servers = Servers(prefill=prefill, decode=decode, port=port + 1)
            return self._hand_over(pair, servers, watch)

    def _single(self, pair: Pair, side: ServerSettings) -> EngineServer:
        """A server of a side's settings without the connector."""
        return self._start(self._launch(pair, side, "single", free_ports(1)))

    def _server(self, pair: Pair, place: Place) -> EngineServer:
        """One side of a pair."""
        flags, env = CONNECTORS[pair.connector].configure(pair, place)
        side = pair.prefill if place.role == "prefill" else pair.decode
        launch = self._launch(pair, side, place.role, place.port - 1)
        return self._start(
            dataclasses.replace(launch, watch=place.folder, connector=flags, env=env)
        )

    def _launch(self, pair: Pair, side: ServerSettings, role: Role, port: int) -> Launch:
        return Launch(
            role=role,
            spec=self.suite.engines[side.engine],
            side=side,
            model=self.installed.model(pair.model),
            draft=self.installed.model(side.draft) if side.draft else None,
            port=port,
            plugins=self.plugins,
        )

    def _start(self, launch: Launch) -> EngineServer:
        engine, role = launch.side.engine, launch.role
        number = next(self._numbers)
        return EngineServer(
            f"{engine} {role}",
            launch.command(),
            env=launch.environment(),
            port=launch.port,
            log=self.folder / "logs" / f"{number:04}-{engine}-{role}.log",
        )

    def _not_started(
        self, pair: Pair, problem: ServerEnded, stack: contextlib.ExitStack
    ) -> Observation:
        stack.close()
        server, text = problem.server, problem.server.text()
        side = pair.prefill if server.name.endswith("prefill") else pair.decode
        if problem.signalled and not reasons.exceptions(text):  # SGLang ends by a signal to itself
            return Observation(lost=f"{problem}\n{reasons.last_lines(text)}")
        try:
            self._starts_alone(pair, side)
        except CannotRun as alone:
            return Observation(here=str(alone))
        return Observation(refused=f"{server.name} does not start: {reasons.of_start(text)}")

    def _hand_over(self, pair: Pair, servers: Servers, watch: Path) -> Observation:
        hand_over = CONNECTORS[pair.connector].hand_over[pair.prefill.engine, pair.decode.engine]
        engines = servers.prefill, servers.decode
        marks = [server.mark() for server in engines]
        answers: list[tuple[int, ...]] = []
        compared: list[rows.StateComparison] = []
        failures: list[str] = []
        lost: str | None = None
        first, *prompts = self._prompts(pair, FIRST)
        with contextlib.suppress(RequestFailed, OSError):
            hand_over(servers, first)  # some connect now, and give up early where a host is busy
        for prompt in prompts:
            answer: tuple[int, ...] = ()
            try:
                if lost is None:
                    answer = hand_over(servers, prompt)
                    compared.append(rows.compare(watch, prompt.name))
            except (RequestFailed, OSError) as problem:
                failures.append(f"prompt of {len(prompt.tokens)} tokens: {problem}")
                lost = lost or _lost(engines, ENDS)
            answers.append(answer)
        lost = lost or _lost(engines)
        texts = [server.text(mark) for server, mark in zip(engines, marks)]
        if lost is None and not any(answers):
            return Observation(refused=reasons.of_requests(texts, failures))
        watched = all((watch / f"{side}.watched").exists() for side in ("prefill", "decode"))
        if lost is None and watched and not any(comparison.received for comparison in compared):
            whole = [server.text() for server in engines]
            why = reasons.of_requests(whole, ["neither log has an error"])
            return Observation(refused=f"decode computed all prompts by itself: {why}")
        why = f" ({reasons.of_requests(texts, ())})" if failures else ""
        return Observation(
            lost=lost,
            tokens=tuple(answers),
            differences=_difference(compared),
            errors=tuple(f"{failure}{why}" for failure in failures),
        )

    def _prompts(self, pair: Pair, *before: int) -> list[Prompt]:
        """Random token ids, the same each time; others in prompts `before` them."""
        config = json.loads((self.installed.model(pair.model) / "config.json").read_text())
        vocabulary = config.get("text_config", config)["vocab_size"]
        prompts = []
        for seed, lengths in ((2, before), (1, pair.prompts)):
            source = random.Random(seed)
            for length in lengths:
                tokens = tuple(source.randrange(4, min(vocabulary, 500)) for _ in range(length))
                prompt = Prompt(
                    number=next(self._numbers),
                    tokens=tokens,
                    new_tokens=pair.new_tokens,
                    timeout=ANSWER,
                )
                prompts.append(prompt)
        return prompts


def _lost(servers: Sequence[EngineServer], timeout: float = 0.0) -> str | None:
    """Which has ended, or does so in as many seconds, with its last words."""
    until = time.monotonic() + timeout
    while True:
        try:
            for server in servers:
                server.alive()
        except ServerEnded as ended:
            return f"{ended}\n{reasons.of_start(ended.server.text())}"
        if time.monotonic() >= until:
            return None
        time.sleep(POLL)


def _difference(compared: Sequence[rows.StateComparison]) -> str | None:
    """The first that differs; "" if all parts were read and are equal, None if some were not."""
    for comparison in compared:
        if comparison.difference:
            return comparison.difference
    received = [comparison for comparison in compared if comparison.received]
    read = received and all(comparison.parts and not comparison.unread for comparison in received)
    return "" if read else None


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
