"""`kvpool demo`: a real transformer prefills in one process and decodes in another.

The model has random weights from a fixed seed, so that both processes build the same one. The
verdict compares with a run in one process over transformers' own cache, which knows nothing of
pools.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.demo_models import MODELS, Settings
from disagg.engines.base import EngineUnavailable, engine_class, engine_names
from disagg.room import KVPoll

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from disagg.endpoint import DecodeEndpoint
    from disagg.plan import TransferPlan

ROOM = "demo"
PATIENCE = 600.0
DTYPES = ("float32", "bfloat16", "float16")
PROBLEMS = (MemoryError, OSError, OverflowError, RuntimeError, TimeoutError, ValueError)


def demo(
    model: Annotated[str, typer.Option(help=f"Family: {', '.join(MODELS)}.")] = "llama",
    engine: Annotated[
        str, typer.Option(help=f"What moves the bytes: {', '.join(engine_names())}.")
    ] = "local",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 2000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prefill in chunks of so many.")] = 512,
    prefill_page: Annotated[int, typer.Option(min=1, help="Tokens a page on prefill.")] = 64,
    decode_page: Annotated[int, typer.Option(min=1, help="Tokens a page on decode.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of weights and prompt.")] = 0,
) -> None:
    """Prefill in one process, decode in another, and compare with a run in a single process.

    Exit status 1 if a logit of a decoded step or a live byte of the decode pool differs.
    """
    from rich.console import Console

    for option, value, known in (
        ("--model", model, MODELS),
        ("--engine", engine, engine_names()),
        ("--dtype", dtype, DTYPES),
    ):
        if value not in known:
            names = ", ".join(known)
            raise typer.BadParameter(f"one of {names}, got {value!r}.", param_hint=option)
    if find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed. Install kvpool[demo].")
    settings = Settings(
        model,
        engine,
        prompt_tokens,
        chunk_tokens,
        dtype,
        seed,
        max(1, (multiprocessing.cpu_count() or 2) // 2),
        prefill_page,
        decode_page,
    )
    console = Console()
    try:
        good = run(settings, new_tokens, console)
    except PROBLEMS as error:
        _say(console, False, _sentence(error))
        good = False
    if not good:
        raise typer.Exit(1)


def run(settings: Settings, new_tokens: int, console: Console) -> bool:
    """The whole demo; whether everything was equal."""
    reason = engine_class(settings.engine).availability()
    if reason is not None:
        raise EngineUnavailable(f"engine {settings.engine!r}: {reason}")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=prefill_process, args=(there, settings), daemon=True)
    # ignored from its first instruction on: Ctrl-C reaches both processes, and this one ends both
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, interrupted)
    there.close()
    try:
        good = decode_process(Peer(here, process), settings, new_tokens, console)
        process.join(5)
        return good
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Peer:
    """The prefill process as the decode process sees it. It says where it is, or why it fails."""

    pipe: Connection
    process: BaseProcess

    def address(self) -> str:
        """Where the prefill endpoint is; raises RuntimeError if the process ends before it is."""
        with suppress(EOFError, OSError):
            if self.pipe.poll(PATIENCE):
                kind, said = self.pipe.recv()
                if kind == "address":
                    return str(said)
                raise self.lost(said)
        raise self.lost()

    def go(self) -> None:
        """Lets prefill compute."""
        try:
            self.pipe.send("go")
        except OSError:
            raise self.lost() from None

    def lost(self, reason: str = "") -> RuntimeError:
        """The error that tells how the process ended, if it has, and why: if need be, in its
        own last words.
        """
        self.process.join(1)
        with suppress(EOFError, OSError):
            while not reason and self.pipe.poll():
                kind, said = self.pipe.recv()
                reason = said if kind == "failure" else ""
        status = self.process.exitcode
        how = "prefill" if status is None else f"prefill ended with status {status}"
        return RuntimeError(f"{how}: {reason or 'it said nothing more'}")


def decode_process(peer: Peer, settings: Settings, new_tokens: int, console: Console) -> bool:
    """This process: receives what prefill computed, decodes from it, and compares."""
    import torch

    from disagg.endpoint import DecodeEndpoint
    from disagg.engines.base import create_engine
    from kvpool.allocator import Allocator
    from kvpool.integrations.transformers import PoolCache
    from kvpool.show import human, layout_table

    model, prompt = settings.build()
    total = settings.prompt_tokens + new_tokens
    pool = settings.pool(model, settings.decode_page, total)
    allocator = Allocator(pool)
    request = allocator.new_request()
    allocator.extend(request, settings.prompt_tokens)
    console.print(layout_table(pool.layout, f"{settings.model}: layout of the decode pool"))
    with DecodeEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
        made = _connect(endpoint, peer)
        console.print(made.explain(settings.prompt_tokens).table())
        endpoint.receive(ROOM, request.address())
        peer.go()
        _watch(endpoint, int(settings.prompt_tokens * pool.bytes_per_token), peer, console)
        moved = endpoint.metrics(ROOM)
        first = int(endpoint.aux(ROOM)["first_token"])
    console.print(
        f"moved {human(moved.bytes_moved)} in {moved.runs:,} runs of "
        f"{human(moved.bytes_per_run)} (neighbouring pages fused): {human(moved.rate)}/s over "
        f"{settings.engine}, bound in {1e3 * moved.bind_seconds:.1f} ms",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"decoding {new_tokens} tokens in this process, then all of it in one ...")
    cache = PoolCache(pool, allocator, [request])
    with torch.no_grad():
        tokens, logits = decode(model, cache, first, new_tokens)
        own = transformers_cache(model)
        expected_first = prefill(model, prompt, own, settings.chunks())
        expected_tokens, expected = decode(model, own, expected_first, new_tokens)
    same_logits = [torch.equal(a, b) for a, b in zip(logits, expected)]
    wrong, checked = compare_bytes(pool, allocator.locations(request)["kv"], own)
    good = all(same_logits) and first == expected_first and tokens == expected_tokens
    _say(console, good, f"logits of {sum(same_logits)} of {new_tokens} decoded steps bit-equal")
    _say(console, not wrong, f"{checked - wrong:,} of {checked:,} live bytes of the pool equal")
    return good and not wrong


def prefill_process(pipe: Connection, settings: Settings) -> None:
    """The other process. It ends with its parent, and tells it what went wrong."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        offer(pipe, settings)
    except EOFError:  # nobody is there to be told
        sys.exit(1)
    except PROBLEMS as error:
        with suppress(OSError):
            pipe.send(("failure", _sentence(error)))
        sys.exit(1)


def offer(pipe: Connection, settings: Settings) -> None:
    """Computes the prompt and offers each chunk as soon as it is there."""
    import torch

    from disagg.endpoint import PrefillEndpoint
    from disagg.engines.base import create_engine
    from kvpool.allocator import Allocator
    from kvpool.integrations.transformers import PoolCache

    model, prompt = settings.build()
    pool = settings.pool(model, settings.prefill_page, settings.prompt_tokens)
    allocator = Allocator(pool)
    request = allocator.new_request()
    cache = PoolCache(pool, allocator, [request])
    with PrefillEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
        pipe.send(("address", endpoint.address))
        pipe.recv()
        with torch.no_grad():
            for chunk in settings.chunks():
                last = chunk.stop == settings.prompt_tokens
                first = prefill(model, prompt, cache, [chunk])
                aux = {"first_token": first} if last else {}
                endpoint.send(ROOM, request.address(), last=last, aux=aux)
        if endpoint.wait(ROOM, PATIENCE) is not KVPoll.Success:
            raise RuntimeError(f"the hand-off failed: {endpoint.failure(ROOM)}")


def prefill(model: Any, prompt: torch.Tensor, cache: Any, chunks: list[range]) -> int:
    """Runs chunks of the prompt; returns the token that follows them."""
    for chunk in chunks:
        ids = prompt[:, chunk.start : chunk.stop]
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())


def decode(model: Any, cache: Any, token: int, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy steps from `token` on; returns the tokens and the logits `[V]` of each step."""
    import torch

    tokens, found = [], []
    for _ in range(steps):
        logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        tokens.append(token)
        found.append(logits[0, -1].clone())
    return tokens, found


def transformers_cache(model: Any) -> Any:
    """transformers' own cache for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def compare_bytes(pool: Any, locations: Any, own: Any) -> tuple[int, int]:
    """Bytes of the pool that differ from transformers' own cache, and bytes compared.

    Entries are picked out of the pool's views by location `[T]`, all layers and roles.
    """
    import torch

    wrong = checked = 0
    for layer in pool.layers:
        roles = [region.role for region in pool.layout.regions if region.layer == layer]
        for role, expected in zip(roles, (own.layers[layer].keys, own.layers[layer].values)):
            view = pool.view(role, layer)
            pages, steps = locations // pool.page_size, locations % pool.page_size
            held = view[pages, steps].reshape(len(locations), -1)
            truth = expected[0].transpose(0, 1).reshape(len(locations), -1)
            pair = [x.contiguous().view(torch.uint8) for x in (held, truth)]
            wrong += int((pair[0] != pair[1]).sum())
            checked += pair[0].numel()
    return wrong, checked


def _connect(endpoint: DecodeEndpoint, peer: Peer) -> TransferPlan:
    """The plan, once prefill has answered."""
    link = endpoint.connect([peer.address()])
    deadline = time.monotonic() + PATIENCE
    while link.plan is None:
        try:
            endpoint.handshake(link, 0.5)
        except TimeoutError:
            if not peer.process.is_alive():
                raise peer.lost() from None
            if time.monotonic() > deadline:
                raise
    return link.plan


def _watch(endpoint: DecodeEndpoint, wanted: int, peer: Peer, console: Console) -> None:
    """A progress bar until the room has ended."""
    from rich.progress import BarColumn, DownloadColumn, Progress

    columns = ("moving", BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("moving", total=wanted)
        while not endpoint.wait(ROOM, 0.05).ended:
            progress.update(task, completed=endpoint.metrics(ROOM).bytes_moved)
            # its last words may be under way
            if not peer.process.is_alive() and not endpoint.wait(ROOM, 0.5).ended:
                raise peer.lost()
        progress.update(task, completed=endpoint.metrics(ROOM).bytes_moved)
    if endpoint.poll(ROOM) is KVPoll.Failed:
        raise peer.lost(f"the hand-off failed: {endpoint.failure(ROOM)}")


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _sentence(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _say(console: Console, good: bool, sentence: str) -> None:
    from rich.text import Text

    verdict = ("PASS", "green") if good else ("FAIL", "red")
    console.print(Text.assemble(verdict, " ", sentence), soft_wrap=True)
