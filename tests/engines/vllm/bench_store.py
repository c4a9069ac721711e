"""What a store saves and costs an engine: tables of `tests.engines.vllm.bench`.

Engines of one model, all on this machine, take turns in every round: one without a store, two with
kvpool's over a folder and over Mooncake, and one with vLLM's own MooncakeStoreConnector. None has a
prefix cache, so what is asked a second time comes from the store: vLLM counts it.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.disagg.store.servers import MIB, Master, memory_of
from tests.engines.vllm.engines import Engine, prompts

COMPUTED = "computed"
FOLDER = "kvpool, file"
MOONCAKE = "kvpool, mooncake"
THEIRS = "MooncakeStoreConnector"
WAYS = COMPUTED, FOLDER, MOONCAKE, THEIRS
TOKEN_BYTES = 32 << 10
"""Of the model's state, at most."""
MEMORY_BYTES = 3 << 30
"""Of Mooncake, for each of the two that use it."""
QUIET_SECONDS = 0.5
"""For how long nothing more is written when all is."""
GENERATED = 64
"""Tokens of an answer, where tokens a second are measured."""


@dataclass(frozen=True)
class Way:
    """An engine, and how many objects its store has."""

    engine: Engine
    objects: Callable[[], int]

    def settled(self) -> int:
        """Waits until nothing more is written; how many objects there are."""
        count, since = self.objects(), time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            time.sleep(0.05)
            if (now := self.objects()) != count:
                count, since = now, time.monotonic()
        return count


@contextmanager
def started(
    names: Sequence[str], model: Path, folder: Path, options: dict[str, Any], tokens: int
) -> Iterator[dict[str, Way]]:
    """Engines that are ready, with room for so many tokens at once, by name."""
    blocks = 64 * options["block_size"]  # of which requests may waste parts
    options = options | {"kv_cache_memory_bytes": (tokens + blocks) * TOKEN_BYTES}
    with ExitStack() as stack:
        ways = {name: stack.enter_context(_way(name, model, folder, options)) for name in names}
        for way in ways.values():
            way.engine.ready()
        yield ways


@contextmanager
def _way(name: str, model: Path, folder: Path, options: dict[str, Any]) -> Iterator[Way]:
    with ExitStack() as stack:
        if name == COMPUTED:
            yield Way(stack.enter_context(Engine("single", model, folder, **options)), lambda: 0)
            return
        if name == FOLDER:
            floor = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
            engine = Engine("store", model, folder, extra={"store": f"file://{floor}"}, **options)
            yield Way(
                stack.enter_context(engine),
                lambda: sum("#" not in path.name for path in floor.rglob("*.full")),
            )
            return
        master = Master()
        stack.enter_context(master.running())
        stack.enter_context(memory_of(master, MEMORY_BYTES))
        if name == MOONCAKE:
            engine = Engine("store", model, folder, extra={"store": master.url()}, **options)
        else:
            engine = _theirs(master, model, folder, options)
        yield Way(stack.enter_context(engine), lambda: len(_keys(master)))


def _theirs(master: Master, model: Path, folder: Path, options: dict[str, Any]) -> Engine:
    """vLLM's own connector, to memory of the same kind of process as ours."""
    document = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{master.port}",
        "protocol": "tcp",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 64 * MIB,
    }
    path = folder / "mooncake.json"
    path.write_text(json.dumps(document))
    connector = {
        "kv_connector": THEIRS,
        "kv_connector_module_path": "tests.engines.vllm.mooncake_store",
        "kv_role": "kv_both",
    }
    environ = {"MOONCAKE_CONFIG_PATH": str(path), "VLLM_HOST_IP": "127.0.0.1"}
    return Engine("store", model, folder, connector=connector, environ=environ, **options)


def _keys(master: Master) -> list[bytes]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{master.http_port}/get_all_keys", timeout=10) as answer:
        return [line for line in answer.read().splitlines() if b"/geometry/" not in line]


def hits(
    model: Path, folder: Path, lengths: list[int], rounds: int, options: dict[str, Any]
) -> None:
    """Prints the time to first token of prompts of so many tokens and one more: computed, and with
    all but the last read from each store. The first round is not counted.
    """
    seconds: dict[tuple[int, str], list[float]] = {}
    with started(WAYS, model, folder, options, max(lengths)) as ways:
        for number in range(rounds):
            for length in lengths:
                (prompt,) = prompts(length + 1, seed=1000 * number + length)
                for name, way in ways.items():
                    taken = _first(way.engine, prompt, 0)
                    if name != COMPUTED:
                        way.settled()
                        taken = _first(way.engine, prompt, length)
                    seconds.setdefault((length, name), []).append(taken)
    table = Table("tokens", *WAYS, title="ms to first token, medians (ratio to computed, lowest)")
    for length in lengths:
        counted = {name: seconds[length, name][1:] for name in WAYS}
        medians = {name: statistics.median(taken) for name, taken in counted.items()}
        table.add_row(
            f"{length:,}",
            *(
                f"{1e3 * medians[name]:.1f} ({medians[name] / medians[COMPUTED]:.3f}, "
                f"{1e3 * min(counted[name]):.1f})"
                for name in WAYS
            ),
        )
    Console().print(table)


def _first(engine: Engine, prompt: list[int], cached: int) -> float:
    """Seconds to a prompt's first token, of which the store has `cached` tokens."""
    name = engine.add(prompt, tokens=2)
    taken = float(engine.event("first", id=name, timeout=300)["seconds"])
    answer = engine.finished(name, timeout=300)
    if answer["cached"] != cached:
        raise ValueError(f"{engine.role}: {answer['cached']} tokens of {cached}.\n{engine.tail()}")
    return taken


def writing(
    model: Path, folder: Path, cases: list[tuple[int, int]], rounds: int, options: dict[str, Any]
) -> None:
    """Prints the tokens a second, of prompts and answers, of engines that write all that they
    compute, for `cases` of requests at once and tokens of a prompt; the first round is not counted.
    """
    rates: dict[tuple[int, int, str], list[float]] = {}
    written: dict[str, int] = {}
    most = max(count * (length + GENERATED) for count, length in cases)
    with started(WAYS, model, folder, options, most) as ways:
        for number in range(rounds):
            for count, length in cases:
                asked = prompts(*[length] * count, seed=7000 * number + length + count)
                # whoever comes first finds a machine that is cooler
                for name in (WAYS, WAYS[::-1])[number % 2]:
                    rate = _rate(ways[name].engine, asked)
                    rates.setdefault((count, length, name), []).append(rate)
                    written[name] = ways[name].settled()
    title = f"tokens a second, medians; answers of {GENERATED} (median of the rounds' ratios)"
    table = Table("requests x tokens", *WAYS, title=title)
    for count, length in cases:
        alone = rates[count, length, COMPUTED][1:]
        row = []
        for name in WAYS:
            counted = rates[count, length, name][1:]
            ratio = statistics.median(one / other for one, other in zip(counted, alone))
            row.append(f"{statistics.median(counted):.0f} ({ratio:.3f})")
        table.add_row(f"{count} x {length:,}", *row)
    Console().print(table, f"objects: {written}")


def _rate(engine: Engine, asked: list[list[int]]) -> float:
    began = time.monotonic()
    names = [engine.add(prompt, tokens=GENERATED) for prompt in asked]
    for name in names:
        engine.finished(name, timeout=600)
    total = sum(len(prompt) + GENERATED for prompt in asked)
    return total / (time.monotonic() - began)
