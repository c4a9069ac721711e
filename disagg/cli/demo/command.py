"""`kvpool demo`: a real transformer prefills in one process and decodes in another.

The model has random weights from a fixed seed, so that both processes build the same one. The
result is compared with runs in one process, over a pool of the same kind and over transformers' own
cache.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.demo.models import MODELS, Settings
from disagg.cli.demo.run import START_TIMEOUT, Check, Decoded, DecodeSide, offer, say
from disagg.engines.base import EngineUnavailable, engine_class, engine_names
from disagg.protocol.status import KVPoll
from kvpool.extras import needs
from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.sentences import nearest

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.plan import TransferPlan
    from disagg.runtime.decode_endpoint import DecodeEndpoint

MODEL_DTYPES = ("float32", "bfloat16", "float16")
PROBLEMS = (MemoryError, OSError, OverflowError, RuntimeError, TimeoutError, ValueError)


def demo(
    model: Annotated[
        str,
        typer.Option(help=f"Model family: {', '.join(MODELS)}.", autocompletion=lambda: [*MODELS]),
    ] = "llama",
    engine: Annotated[
        str,
        typer.Option(
            help=f"Transfer engine: {', '.join(engine_names())}.", autocompletion=engine_names
        ),
    ] = "local",
    prompt_tokens: Annotated[
        list[int], typer.Option(min=1, help="Length of a prompt; repeatable.")
    ] = [2000],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prefill chunk.")] = 512,
    prefill_page: Annotated[
        int, typer.Option(min=0, help="Tokens per page on prefill (0: the family's default).")
    ] = 0,
    decode_page: Annotated[int, typer.Option(min=0, help="Tokens per page on decode.")] = 0,
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of the model: {', '.join(MODEL_DTYPES)}.")
    ] = "float32",
    packing: Annotated[
        str, typer.Option(help="Packing of the pool: a dtype, fp8 or mxfp8 (default: the dtype).")
    ] = "",
    device: Annotated[
        str, typer.Option(help="Device of models and pools: cpu, cuda:0, npu:0.")
    ] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights and prompt.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; all else on stderr.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the hand-offs in time to a .html or .svg file.")
    ] = None,
) -> None:
    """Prefill in one process, decode in another, and compare.

    Beside them the same prompts are run in a single process. Exit status 1 if a logit of a decoded
    step or a live byte of the decode pool differs.

    JSON: model, engine, device, dtype, packing; passed; failure (what ended it early, or null);
    prompts (tokens, bytes, runs, bytes_per_second, bind_seconds; checks, each with passed and
    found).

    \b
    Example:
      kvpool demo --model qwen3_next --engine nixl --decode-page 16
    """
    from rich.console import Console

    from kvpool.render.chart import chart_problem

    for option, value, known in (
        ("--model", model, MODELS),
        ("--engine", engine, engine_names()),
        ("--dtype", dtype, MODEL_DTYPES),
        ("--packing", packing or dtype, (dtype, *PACKINGS)),
    ):
        if value not in known:
            names = ", ".join(known)
            raise typer.BadParameter(
                f"must be one of {names}, got {value!r}.{nearest(value, known)}", param_hint=option
            )
    if find_spec("transformers") is None:
        raise typer.BadParameter(f"the demo {needs('transformers')}")
    if timeline is not None and (problem := chart_problem(timeline)):
        raise typer.BadParameter(problem, param_hint="--timeline")
    settings = Settings(
        model,
        engine,
        tuple(prompt_tokens),
        chunk_tokens,
        dtype,
        packing or dtype,
        seed,
        max(1, (multiprocessing.cpu_count() or 2) // 2),
        prefill_page,
        decode_page,
        device,
    )
    console, failure = Console(stderr=as_json), None
    found: list[Decoded] = []
    try:
        for each in run(settings, new_tokens, console, timeline):
            found.append(each)
    except PROBLEMS as error:
        failure = _sentence(error)
        say(console, Check(False, failure))
    passed = failure is None and all(check.passed for each in found for check in each.checks)
    if as_json:
        shown = ("model", "engine", "device", "dtype", "packing")
        made = {name: getattr(settings, name) for name in shown}
        made |= {"passed": passed, "failure": failure, "prompts": [*map(asdict, found)]}
        typer.echo(json.dumps(made))
    if not passed:
        raise typer.Exit(1)


def run(
    settings: Settings, new_tokens: int, console: Console, timeline: Path | None = None
) -> Iterator[Decoded]:
    """Runs the demo, prompt by prompt. Draws its hand-offs to `timeline`."""
    from kvpool.device import get_device

    get_device(settings.device)
    reason = engine_class(settings.engine).availability()
    if reason is not None:
        raise EngineUnavailable(f"engine {settings.engine!r}: {reason}")
    with spawned(prefill_process, settings) as peer:
        yield from decode_process(peer, settings, new_tokens, console, timeline)
        peer.process.join(5)


@dataclass(frozen=True)
class PrefillProcess:
    """The prefill process, which sends its endpoint address, or why it failed."""

    pipe: Connection
    process: BaseProcess

    def address(self) -> str:
        """The endpoint address of prefill. Raises RuntimeError if the process ends before."""
        with suppress(EOFError, OSError):
            if self.pipe.poll(START_TIMEOUT):
                kind, text = self.pipe.recv()
                if kind == "address":
                    return str(text)
                raise self.lost(text)
        raise self.lost()

    def go(self) -> None:
        """Starts prefill."""
        try:
            self.pipe.send("go")
        except OSError:
            raise self.lost() from None

    def lost(self, reason: str = "") -> RuntimeError:
        """An error with the process's exit status and the reason that it sent."""
        self.process.join(1)
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, text = self.pipe.recv()
                reason = text if kind == "failure" else reason
        status = self.process.exitcode
        how = "prefill" if status is None else f"prefill ended with status {status}"
        return RuntimeError(f"{how}: {reason or 'it gave no reason'}")


@contextmanager
def spawned(target: Callable[..., None], *arguments: object) -> Iterator[PrefillProcess]:
    """A process that runs `target(pipe, *arguments)`; it is killed at the end."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=target, args=(there, *arguments), daemon=True)
    # the child ignores Ctrl-C, which reaches both processes: this one ends both
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, interrupted)
    there.close()
    try:
        yield PrefillProcess(here, process)
    finally:
        process.kill()
        process.join()


def decode_process(
    peer: PrefillProcess,
    settings: Settings,
    new_tokens: int,
    console: Console,
    drawing: Path | None = None,
) -> Iterator[Decoded]:
    """The decode process: receives every prompt from prefill, decodes and compares."""
    from disagg.engines.base import create_engine
    from disagg.runtime.decode_endpoint import DecodeEndpoint
    from kvpool.render.text import layout_table

    model, prompt = settings.build()
    pools = [settings.pool(model, settings.decode_page, new_tokens) for _ in range(2)]
    console.print(
        layout_table(pools[0].layout, f"{settings.model}: layout of the decode pool"), crop=False
    )
    with DecodeEndpoint(pools[0].layout, create_engine(settings.engine)) as endpoint:
        made = _connect(endpoint, peer)
        console.print(made.explain(max(settings.prompts)).table(), crop=False)
        side = DecodeSide(settings, model, prompt, pools[0], pools[1], new_tokens, console)

        def watch(room: str, nbytes: int) -> None:
            peer.go()
            _watch(endpoint, room, nbytes, peer, console)

        for room in range(len(settings.prompts)):
            yield side.decode(endpoint, room, watch)
        if drawing is not None:
            _draw(endpoint, settings, drawing)
            console.print(f"wrote {drawing}", markup=False, soft_wrap=True)


def _draw(endpoint: DecodeEndpoint, settings: Settings, path: Path) -> None:
    """The hand-offs of all prompts, in time."""
    from disagg.timeline import timeline
    from kvpool.render.chart import write_chart

    rooms = {
        f"{tokens:,} tokens": endpoint.metrics(str(room))
        for room, tokens in enumerate(settings.prompts)
    }
    write_chart(timeline(rooms, f"{settings.model} over {settings.engine}"), path)


def prefill_process(pipe: Connection, settings: Settings) -> None:
    """The prefill process. It ends with its parent, and sends it errors."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        offer(pipe, settings)
    except EOFError:  # the parent has ended
        sys.exit(1)
    except PROBLEMS as error:
        with suppress(OSError):
            pipe.send(("failure", _sentence(error)))
        sys.exit(1)


def _connect(endpoint: DecodeEndpoint, peer: PrefillProcess) -> TransferPlan:
    """The plan, after prefill has answered."""
    link = endpoint.connect([peer.address()])
    deadline = time.monotonic() + START_TIMEOUT
    while link.plan is None:
        try:
            endpoint.handshake(link, 0.5)
        except TimeoutError:
            if not peer.process.is_alive():
                raise peer.lost() from None
            if time.monotonic() > deadline:
                raise
    return link.plan


def _watch(
    endpoint: DecodeEndpoint, room: str, wanted: int, peer: PrefillProcess, console: Console
) -> None:
    """A progress bar until the room has ended."""
    from rich.progress import BarColumn, DownloadColumn, Progress

    columns = ("moving", BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("moving", total=wanted)
        while not _ended(endpoint, room, 0.05):
            progress.update(task, completed=endpoint.metrics(room).bytes_moved)
            # its messages may still arrive
            if not peer.process.is_alive() and not _ended(endpoint, room, 0.5):
                raise peer.lost()
        progress.update(task, completed=endpoint.metrics(room).bytes_moved)
    if endpoint.poll(room) is KVPoll.Failed:
        raise peer.lost(f"the hand-off failed: {endpoint.failure(room)}")


def _ended(endpoint: DecodeEndpoint, room: str, seconds: float) -> bool:
    """Whether a room ends within some seconds."""
    with suppress(TimeoutError):
        endpoint.wait(room, seconds)
    return endpoint.poll(room).ended


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _sentence(error: BaseException) -> str:
    return str(error) or type(error).__name__
