"""The two processes of the demo: this one spawns prefill, decodes, and shows what arrives."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from disagg.cli.demo.models import Settings
from disagg.cli.demo.run import START_TIMEOUT, Decoded, DecodeSide, offer
from disagg.protocol.status import KVPoll

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.plan import TransferPlan
    from disagg.runtime.decode_endpoint import DecodeEndpoint

PROBLEMS = (MemoryError, OSError, OverflowError, RuntimeError, TimeoutError, ValueError)


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


def sentence_of(error: BaseException) -> str:
    """An error's message, or its name."""
    return str(error) or type(error).__name__


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
            pipe.send(("failure", sentence_of(error)))
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
