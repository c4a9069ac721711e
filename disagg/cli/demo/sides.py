"""Both sides of the demo: prefill in a process of its own, and decode, which compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress
from rich.text import Text

from disagg.cli.demo.models import DemoSettings
from disagg.engines.base import create_engine
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from disagg.timeline import timeline
from kvpool.allocation.allocator import Allocator
from kvpool.integrations.transformers import PoolCache
from kvpool.layout.units import human
from kvpool.process import OtherProcess
from kvpool.render.chart import write_chart
from kvpool.render.text import layout_table
from kvpool.testing.memory import same_as_pool

START_TIMEOUT = 600.0  # seconds to build a model, or to compute a prompt
CONNECT_TIMEOUT = 60.0
MAX_ROUNDING = 0.1  # error of a quantised pool, relative to the largest logit


class PrefillSide:
    """Called by the other process; one demo after the other."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def open(self, settings: DemoSettings) -> str:
        """Builds the model, a pool and an endpoint, whose address it returns."""
        self._stack.close()
        self._settings = settings
        self._model, self._prompt = settings.build()
        self._pool = settings.pool(self._model, settings.prefill_page)
        self._allocator = Allocator(self._pool)
        endpoint = PrefillEndpoint(self._pool.layout, create_engine(settings.engine))
        self._endpoint = self._stack.enter_context(endpoint)
        return self._endpoint.address

    def send(self, number: int) -> None:
        """Computes a prompt, and sends each chunk as soon as it is computed."""
        tokens, endpoint = self._settings.prompts[number], self._endpoint
        room, request = str(number), self._allocator.new_request()
        cache = PoolCache(self._pool, self._allocator, [request])
        with torch.no_grad():
            for chunk in self._settings.chunks(tokens):
                last = chunk.stop == tokens
                first = prefill(self._model, self._prompt, cache, [chunk])
                aux = {"first_token": first} if last else {}
                after = self._pool.device.record()
                endpoint.send(room, request.address(), last=last, aux=aux, after=after)
        if endpoint.wait(room, START_TIMEOUT) is not KVPoll.Success:
            raise RuntimeError(f"the hand-off failed: {endpoint.failure(room)}")
        self._allocator.free(request)


@dataclass(frozen=True)
class Comparison:
    """Whether it passed, and what it found."""

    passed: bool
    found: str

    def print(self, console: Console) -> None:
        """Prints PASS or FAIL, and what was found."""
        verdict = ("PASS", "green") if self.passed else ("FAIL", "red")
        console.print(Text.assemble(verdict, " ", self.found), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """A prompt of `tokens` tokens that was moved in `runs` runs and decoded; its comparisons."""

    tokens: int
    bytes: int
    runs: int
    bytes_per_second: float
    bind_seconds: float
    checks: tuple[Comparison, ...]


def decoded_prompts(
    other: OtherProcess, settings: DemoSettings, console: Console, drawing: Path | None = None
) -> Iterator[DecodedPrompt]:
    """Receives every prompt from a `PrefillSide`, decodes and compares; draws to `drawing`."""
    other.post("open", settings)
    side = DecodeSide(other, settings, console)
    with side.endpoint:
        link = side.endpoint.connect([other.answer(START_TIMEOUT)], CONNECT_TIMEOUT)
        if link.plan is None:
            raise RuntimeError("prefill: the handshake has ended without a plan.")
        console.print(link.plan.explain(max(settings.prompts)).table(), crop=False)
        yield from map(side.decode, range(len(settings.prompts)))
        if drawing is not None:
            names = (f"{tokens:,} tokens" for tokens in settings.prompts)
            rooms = {name: side.endpoint.metrics(str(room)) for room, name in enumerate(names)}
            title = f"{settings.model} over {settings.engine}"
            write_chart(timeline(rooms, title), drawing)
            console.print(f"wrote {drawing}", markup=False, soft_wrap=True)


class DecodeSide:
    """The decode process: its pool, and another pool for the run in a single process."""

    def __init__(self, other: OtherProcess, settings: DemoSettings, console: Console) -> None:
        self._other, self._settings, self._console = other, settings, console
        self._model, self._prompt = settings.build()
        page = settings.decode_page
        self._pool, self._single = (settings.pool(self._model, page) for _ in range(2))
        layout = self._pool.layout
        table = layout_table(layout, f"{settings.model}: layout of the decode pool")
        console.print(table, crop=False)
        self.endpoint = DecodeEndpoint(layout, create_engine(settings.engine))

    def decode(self, number: int) -> DecodedPrompt:
        """Receives one prompt, decodes from it and compares."""
        tokens, room, console = (self._settings.prompts[number], str(number), self._console)
        allocator = Allocator(self._pool)
        request = allocator.new_request()
        allocator.extend(request, tokens, received=True)
        self.endpoint.receive(room, request.address())
        self._other.post("send", number)
        self._watch(room, self._pool.layout.live_bytes(tokens))
        moved = self.endpoint.metrics(room)
        console.print(
            f"{tokens:,} tokens: moved {human(moved.bytes_moved)} in {moved.runs:,} runs of "
            f"{human(moved.bytes_per_run)} (adjacent items fused): {human(moved.rate)}/s over "
            f"{self._settings.engine}, bound in {1e3 * moved.bind_seconds:.1f} ms\n"
            f"decoding {self._settings.new_tokens} tokens, then the whole prompt in a single "
            "process ...",
            markup=False,
            soft_wrap=True,
        )
        checks = self._compare(allocator, request, int(self.endpoint.aux(room)["first_token"]))
        for check in checks:
            check.print(console)
        return DecodedPrompt(
            tokens=tokens,
            bytes=moved.bytes_moved,
            runs=moved.runs,
            bytes_per_second=moved.rate,
            bind_seconds=moved.bind_seconds,
            checks=checks,
        )

    def _watch(self, room: str, nbytes: int) -> None:
        """A progress bar until the room has ended. Raises RuntimeError if it or prefill fails."""
        columns = "moving", BarColumn(), DownloadColumn(binary_units=True)
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("moving", total=nbytes)
            while not (self.endpoint.poll(room).ended or self._other.answers()):
                with suppress(TimeoutError):
                    self.endpoint.wait(room, 0.05)
                progress.update(task, completed=self.endpoint.metrics(room).bytes_moved)
        failed = self.endpoint.poll(room) is KVPoll.Failed
        if not failed or self._other.answers(1.0):  # the reason may be prefill's
            self._other.answer(START_TIMEOUT)
        if self.endpoint.wait(room, START_TIMEOUT) is not KVPoll.Success:
            raise RuntimeError(f"prefill: the hand-off failed: {self.endpoint.failure(room)}")

    @torch.no_grad()
    def _compare(self, allocator: Any, request: Any, first: int) -> tuple[Comparison, ...]:
        """Decodes, and compares with runs over another pool and over transformers' own cache."""
        from transformers import DynamicCache

        settings, model = self._settings, self._model
        received, chunks = request.address(), settings.chunks(request.num_tokens)
        single = PoolCache.new(self._single, Allocator(self._single))
        own: Any = DynamicCache(config=model.config)
        firsts = [prefill(model, self._prompt, cache, chunks) for cache in (single, own)]
        live = same_as_pool(self._pool, received, self._single, single.requests[0].address())
        tokens, logits = [first], list[torch.Tensor]()
        cache = PoolCache(self._pool, allocator, [request])
        for _ in range(settings.new_tokens):
            logits.append(next_logits(model, cache, tokens[-1]))
            tokens.append(int(logits[-1].argmax()))
        again, truth = (
            [next_logits(model, cache, token) for token in tokens[:-1]] for cache in (single, own)
        )
        allocator.free(request)
        single.allocator.free(single.requests[0])

        def equal_logits(others: list[torch.Tensor], other_first: int, cache: str) -> Comparison:
            equal = sum(map(torch.equal, logits, others))
            words = f"logits of {equal} of {len(others)} decoded steps bit-equal to one process"
            return Comparison(first == other_first and equal == len(others), f"{words}, {cache}")

        right = f"{live.checked - live.wrong:,} of {live.checked:,}"
        checks = [
            equal_logits(again, firsts[0], "same pool"),
            Comparison(not live.wrong, f"{right} live bytes of the pool equal"),
        ]
        if settings.exact:
            checks.append(equal_logits(truth, firsts[1], "transformers' own cache"))
        else:
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, truth))
            words = f"largest logit error of {settings.packing}: {error:.2%} of the largest"
            within = f"{words} (at most {MAX_ROUNDING:.0%})"
            checks.append(Comparison(error <= MAX_ROUNDING, within))
        return tuple(checks)


def prefill(model: Any, prompt: torch.Tensor, cache: Any, chunks: list[range]) -> int:
    """Runs chunks of the prompt; returns the next token."""
    for chunk in chunks:
        ids = prompt[:, chunk.start : chunk.stop]
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())


def next_logits(model: Any, cache: Any, token: int) -> torch.Tensor:
    """The logits `[V]` after one more token."""
    ids = torch.tensor([[token]], device=model.device)
    logits: torch.Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return logits[0, -1].clone()
