"""Conversations over a pair: the prompt of a turn is all that was said before it and what the user
adds. How many of its tokens prefill computes is counted by prefill's own scheduler.

With kvpool's store, or with vLLM's own NixlConnector, by which prefill reads what decode keeps of
the turn before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from disagg.store.lookup import REFRESH_SECONDS
from kvpool.prefix.chain import Chain, token_ids
from tests.engines.pair import EXACT, compare
from tests.engines.process import EngineFailed
from tests.engines.vllm.engines import NIXL, PREFILL, Engine, prompts, side_channel

Connector = Literal["kvpool", "NixlConnector"]
Start = Callable[..., Engine]
TOLD = prompts(490, 160, 80, seed=5)
"""What the user says."""
ANSWER = 96
"""Tokens of each answer. Within the first a chunk of 256 ends, and within the second."""
MEETING = prompts(480, seed=6)[0]
"""Said before, so that each side has written something. What engines of other ranks have written is
looked for every `REFRESH_SECONDS`.
"""
CACHED = {"enable_prefix_caching": True}
TP = {"tensor_parallel_size": 2}
READS_BACK = {
    **NIXL,
    # by default it reads no less than 64 tokens
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what each side is started with. `kinds` are those of the store's objects."""

    model: str
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    both: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 256
    kinds: tuple[str, ...] = ("full",)

    @property
    def hybrid(self) -> bool:
        """Its recurrent state is that of a prompt without its last token."""
        return "state" in self.kinds

    @property
    def strangers(self) -> bool:
        """The two sides have other ranks."""
        size = "tensor_parallel_size"
        return self.prefill.get(size, 1) != self.decode.get(size, 1)

    @property
    def alone(self) -> dict[str, Any]:
        """Options of an engine that computes every prompt as a whole."""
        return {"dtype": self.both.get("dtype", "bfloat16")}

    def stored(self, history: list[int]) -> int:
        """How many tokens are stored: whole chunks. The last token was never an input."""
        return (len(history) - 1) // self.chunk * self.chunk if history else 0


CASES = {
    "llama": Case(model="llama", both={"block_size": 32, **CACHED, **EXACT}),
    "llama, TP 2 to 1": Case(
        model="llama",
        prefill={"block_size": 32, **TP},
        decode={"block_size": 32},
        both=EXACT,
    ),
    "llama, TP 2 to 1, blocks of 32 to 128": Case(
        model="llama",
        prefill={"block_size": 32, **TP},
        decode={"block_size": 128, **CACHED},
        both=EXACT,
    ),
    "gemma3": Case(model="gemma3", both={"block_size": 32, **EXACT}, kinds=("full", "window")),
    "gemma3, blocks of 32 to 64": Case(
        model="gemma3",
        prefill={"block_size": 32},
        decode={"block_size": 64},
        both=EXACT,
        kinds=("full", "window"),
    ),
    "qwen3_next": Case(
        model="qwen3_next", both={"block_size": 256, **CACHED}, kinds=("full", "state")
    ),
    "falcon_h1": Case(
        model="falcon_h1", both={"block_size": 256, **CACHED, **EXACT}, kinds=("full", "state")
    ),
    "deepseek_v3": Case(model="deepseek_v3", both=EXACT),
    "deepseek_v3, chunks of 64": Case(model="deepseek_v3", both=EXACT, chunk=64),
}


@dataclass(frozen=True)
class Turn:
    """`computed` tokens of the prompt were computed by prefill."""

    prompt: list[int]
    answer: list[int]
    computed: int

    @property
    def history(self) -> list[int]:
        """All that was said when it has ended."""
        return [*self.prompt, *self.answer]


class Conversation:
    """A pair of engines that are started by `start`, as the fixture of that name does, and the
    turns of a user. `folder` is empty; oracles in the engines of kvpool write to it.
    """

    def __init__(self, case: Case, start: Start, folder: Path, connector: Connector) -> None:
        self._case, self._back = case, connector != "kvpool"
        self._floor, self._joined = folder / "floor", folder / "joined"
        self.watched = folder / "prefill", folder / "decode"
        for path in (self._floor, self._joined, *self.watched):
            path.mkdir()
        extra = {"store": f"file://{self._floor}", "chunk_tokens": case.chunk}
        engines = []
        for watch, own in zip(self.watched, (case.prefill, case.decode)):
            options = {**case.both, **own}
            if self._back:
                options |= {"connector": READS_BACK, "environ": side_channel(watch.name)}
                options["enable_prefix_caching"] = False
            else:
                options |= {"extra": extra, "watch": watch}
            engines.append(start("store", case.model, **options))
        self.prefill, self.decode = engines

    def turns(self, told: list[list[int]] = TOLD, tokens: int = ANSWER) -> list[Turn]:
        """Holds the conversation."""
        self.prefill.ready(), self.decode.ready()
        if self._case.strangers and not self._back:
            self._turn(MEETING, tokens, PREFILL)
            time.sleep(REFRESH_SECONDS)
        turns: list[Turn] = []
        history: list[int] = []
        params = PREFILL
        for words in told:
            turn, params = self._turn([*history, *words], tokens, params)
            turns.append(turn)
            history = turn.history
        return turns

    def _turn(
        self, prompt: list[int], tokens: int, params: dict[str, Any]
    ) -> tuple[Turn, dict[str, Any]]:
        """A turn, and what prefill is told in the next one."""
        first = self.prefill.generate([prompt], tokens=1, params=[dict(params)])[0]
        if first["reason"] != ["length"]:
            raise EngineFailed(f"prefill ended with {first['reason']}.\n{self.prefill.tail()}")
        last = self.decode.generate([prompt], tokens=tokens, params=[first["params"]])[0]
        if last["reason"] != ["length"]:
            logs = f"{self.prefill.tail()}\n{self.decode.tail()}"
            raise EngineFailed(f"decode ended with {last['reason']}.\n{logs}")
        turn = Turn(prompt, last["tokens"][0], first["computed"])
        if self._back:
            # as a proxy of vLLM's does that knows conversations
            back = {"do_remote_decode": True, "do_remote_prefill": False}
            return turn, PREFILL | last["params"] | back
        until_stored(self._case, self._floor, turn.history)
        return turn, PREFILL

    def assert_equal(self) -> None:
        """What was read, of the store and of prefill, is what every engine that wrote it had."""
        compared = set()
        for number, (reader, writer) in enumerate(product(self.watched, repeat=2)):
            compared |= compare_folders(reader, writer, self._joined / str(number))
        assert compared == {room for folder in self.watched for room in _rooms(folder, "decode")}
        assert len(_rooms(self.watched[0], "decode")) == len(TOLD) - 1


def keys_of(case: Case, history: list[int]) -> list[bytes]:
    """Keys of the chunks that are stored of what was said."""
    chain = Chain(case.chunk)
    chain.append(token_ids(history[: case.stored(history)]))
    return chain.keys


def until_stored(case: Case, floor: Path, history: list[int]) -> None:
    """Waits until all is stored that the next turn finds."""
    *before, last = keys_of(case, history)
    wanted = [f"{key.hex()}/*.full" for key in before]
    wanted += [f"{last.hex()}/*.{kind}" for kind in case.kinds]
    until = time.monotonic() + 30
    # a name with # is of one that is being written
    while not all(
        any("#" not in path.name for path in floor.glob(f"*/{pattern}")) for pattern in wanted
    ):
        assert time.monotonic() < until, [*floor.rglob("*.*")]
        time.sleep(0.05)


def compare_folders(reader: Path, writer: Path, place: Path) -> set[str]:
    """Compares what one engine has read with what another wrote, by what their oracles have saved;
    returns the rooms and keys that both have. `place` is a folder to make.
    """
    place.mkdir()
    shared = _rooms(reader, "decode") & _rooms(writer, "prefill")
    for room, (side, folder) in product(shared, (("decode", reader), ("prefill", writer))):
        for path in folder.glob(f"{side}.{room}.?.pt"):
            os.link(path, place / path.name)
    _, nbytes, wrong = compare(place)
    assert not wrong
    assert bool(nbytes) == bool(shared)
    return shared


def _rooms(folder: Path, side: str) -> set[str]:
    """Rooms, and keys of the store, of which a side has saved something."""
    names = (path.name for path in folder.glob(f"{side}.*.pt"))
    return {name.removeprefix(f"{side}.").rsplit(".", 2)[0] for name in names}


def answers_alone(
    engine: Engine, case: Case, told: list[list[int]] = TOLD, tokens: int = ANSWER
) -> list[list[int]]:
    """What one engine answers that computes each prompt as a whole."""
    history: list[int] = []
    answers = []
    for words in told:
        prompt = [*history, *words]
        answer = engine.generate([prompt], tokens=tokens, split=case.hybrid)[0]["tokens"][0]
        answers.append(answer)
        history = [*prompt, *answer]
    return answers
