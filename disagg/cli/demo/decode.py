"""Decode's side of the demo: it receives, decodes, and compares with runs in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.cli.demo.models import DemoSettings
from disagg.cli.demo.prefill import START_TIMEOUT, prefill
from disagg.protocol.status import KVPoll

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from disagg.cli.demo.check import ByteCount
    from disagg.plan import TransferPlan
    from disagg.runtime.decode_endpoint import DecodeEndpoint
    from kvpool.process import OtherProcess

MAX_ROUNDING = 0.1  # error of a quantised pool, relative to the largest logit


@dataclass(frozen=True)
class Comparison:
    """Whether it passed, and what it found."""

    passed: bool
    found: str


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
    """Receives every prompt from the `PrefillSide` of another process, decodes and compares. Draws
    the hand-offs to `drawing`.
    """
    from disagg.engines.base import create_engine
    from disagg.runtime.decode_endpoint import DecodeEndpoint
    from kvpool.render.text import layout_table

    other.post("open", settings)
    model, prompt = settings.build()
    pool, single = (settings.pool(model, settings.decode_page) for _ in range(2))
    table = layout_table(pool.layout, f"{settings.model}: layout of the decode pool")
    console.print(table, crop=False)
    with DecodeEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
        plan = _connect(endpoint, other)
        console.print(plan.explain(max(settings.prompts)).table(), crop=False)
        side = DecodeSide(
            settings=settings,
            model=model,
            prompt=prompt,
            pool=pool,
            single=single,
            endpoint=endpoint,
            other=other,
            console=console,
        )
        for room in range(len(settings.prompts)):
            yield side.decode(room)
        if drawing is not None:
            side.draw(drawing)


def _connect(endpoint: DecodeEndpoint, other: OtherProcess) -> TransferPlan:
    """The plan, after prefill has answered."""
    link = endpoint.connect([other.answer(START_TIMEOUT)])
    deadline = time.monotonic() + START_TIMEOUT
    while link.plan is None:
        try:
            endpoint.handshake(link, 0.5)
        except TimeoutError:
            if not other.alive:
                other.answer()  # raises with its exit status
            if time.monotonic() > deadline:
                raise
    return link.plan


@dataclass(frozen=True, kw_only=True)
class DecodeSide:
    """The decode process: its pool, and another pool for the run in a single process."""

    settings: DemoSettings
    model: Any
    prompt: torch.Tensor
    pool: Any
    single: Any
    endpoint: DecodeEndpoint
    other: OtherProcess
    console: Console

    def decode(self, number: int) -> DecodedPrompt:
        """Receives one prompt, decodes from it and compares."""
        from kvpool.allocation.allocator import Allocator
        from kvpool.render.text import human

        tokens, room, tell = self.settings.prompts[number], str(number), self.console.print
        allocator = Allocator(self.pool)
        request = allocator.new_request()
        allocator.extend(request, tokens, received=True)
        self.endpoint.receive(room, request.address())
        self.other.post("send", number)
        self._watch(room, self.pool.layout.live_bytes(tokens))
        moved = self.endpoint.metrics(room)
        tell(
            f"{tokens:,} tokens: moved {human(moved.bytes_moved)} in {moved.runs:,} runs of "
            f"{human(moved.bytes_per_run)} (adjacent items fused): {human(moved.rate)}/s over "
            f"{self.settings.engine}, bound in {1e3 * moved.bind_seconds:.1f} ms",
            markup=False,
            soft_wrap=True,
        )
        steps = self.settings.new_tokens
        tell(f"decoding {steps} tokens, then the whole prompt in a single process ...")
        checks = self.compare(allocator, request, int(self.endpoint.aux(room)["first_token"]))
        for check in checks:
            say(self.console, check)
        return DecodedPrompt(
            tokens=tokens,
            bytes=moved.bytes_moved,
            runs=moved.runs,
            bytes_per_second=moved.rate,
            bind_seconds=moved.bind_seconds,
            checks=checks,
        )

    def _watch(self, room: str, wanted: int) -> None:
        """A progress bar until the room has ended. Raises RuntimeError if it or prefill fails."""
        from rich.progress import BarColumn, DownloadColumn, Progress

        bar, bytes_moved = BarColumn(), DownloadColumn(binary_units=True)
        with Progress("moving", bar, bytes_moved, console=self.console) as progress:
            task = progress.add_task("moving", total=wanted)
            while not self._ended(room, 0.05):
                progress.update(task, completed=self.endpoint.metrics(room).bytes_moved)
                # its messages may still arrive
                if self.other.answers() and not self._ended(room, 0.5):
                    break
            progress.update(task, completed=self.endpoint.metrics(room).bytes_moved)
        failed = self.endpoint.poll(room) is KVPoll.Failed
        if not failed or self.other.answers(1.0):  # the reason may be prefill's
            self.other.answer(START_TIMEOUT)
        if failed:
            raise RuntimeError(f"prefill: the hand-off failed: {self.endpoint.failure(room)}")

    def _ended(self, room: str, seconds: float) -> bool:
        """Whether a room ends within some seconds."""
        with suppress(TimeoutError):
            self.endpoint.wait(room, seconds)
        return self.endpoint.poll(room).ended

    def compare(self, allocator: Any, request: Any, first: int) -> tuple[Comparison, ...]:
        """Decodes from the received state, and compares with runs in this process over a pool of
        the same kind and over transformers' own cache.
        """
        import torch

        from disagg.cli.demo.check import same_as_pool, same_as_transformers
        from kvpool.allocation.allocator import Allocator
        from kvpool.integrations.transformers import PoolCache

        steps, exact = self.settings.new_tokens, self.settings.exact
        received, chunks = request.address(), self.settings.chunks(request.num_tokens)
        again = PoolCache.new(self.single, Allocator(self.single))
        own = transformers_cache(self.model)
        with torch.no_grad():
            firsts = [prefill(self.model, self.prompt, cache, chunks) for cache in (again, own)]
            single_address = again.requests[0].address()
            live = same_as_pool(self.pool, received, self.single, single_address)
            truth = same_as_transformers(self.pool, received, own) if exact else None
            cache = PoolCache(self.pool, allocator, [request])
            tokens, logits = decode(self.model, cache, first, steps)
            tokens2, logits2 = decode(self.model, again, firsts[0], steps)
            forced = None if exact else [first, *tokens]
            tokens3, logits3 = decode(self.model, own, firsts[1], steps, forced)
        allocator.free(request)
        again.allocator.free(again.requests[0])

        def logits_equal(others: list[torch.Tensor], same: bool, cache: str) -> Comparison:
            equal = sum(map(torch.equal, logits, others))
            words = f"logits of {equal} of {steps} decoded steps bit-equal to one process"
            return Comparison(same and equal == steps, f"{words}, {cache}")

        def bytes_equal(count: ByteCount, what: str) -> Comparison:
            right = f"{count.checked - count.wrong:,} of {count.checked:,}"
            return Comparison(not count.wrong, f"{right} {what} equal")

        same = first == firsts[0] and tokens == tokens2
        checks = [
            logits_equal(logits2, same, "same pool"),
            bytes_equal(live, "live bytes of the pool"),
        ]
        if truth is not None:
            checks.append(logits_equal(logits3, tokens == tokens3, "transformers' own cache"))
            checks.append(bytes_equal(truth, "bytes that transformers' own cache holds"))
        else:
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, logits3))
            words = f"largest logit error of {self.settings.packing}: {error:.2%} of the largest"
            within = f"{words} (at most {MAX_ROUNDING:.0%})"
            checks.append(Comparison(error <= MAX_ROUNDING, within))
        return tuple(checks)

    def draw(self, path: Path) -> None:
        """The hand-offs of all prompts, in time."""
        from disagg.timeline import timeline
        from kvpool.render.chart import write_chart

        rooms = {
            f"{tokens:,} tokens": self.endpoint.metrics(str(room))
            for room, tokens in enumerate(self.settings.prompts)
        }
        write_chart(timeline(rooms, f"{self.settings.model} over {self.settings.engine}"), path)
        self.console.print(f"wrote {path}", markup=False, soft_wrap=True)


def decode(
    model: Any, cache: Any, token: int, steps: int, forced: list[int] | None = None
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy steps from `token` (or over the tokens `forced`); returns the tokens and the logits
    `[V]` of each step.
    """
    import torch

    tokens, logits_of = [], []
    for step in range(steps):
        token = token if forced is None else forced[step]
        ids = torch.tensor([[token]], device=model.device)
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        tokens.append(token)
        logits_of.append(logits[0, -1].clone())
    return tokens, logits_of


def transformers_cache(model: Any) -> Any:
    """transformers' own cache for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def say(console: Console, check: Comparison) -> None:
    """Prints PASS or FAIL, and what was found."""
    from rich.text import Text

    verdict = ("PASS", "green") if check.passed else ("FAIL", "red")
    console.print(Text.assemble(verdict, " ", check.found), soft_wrap=True)
