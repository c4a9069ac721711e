"""Both sides of the demo: prefill sends; decode receives, decodes and compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from disagg.cli.demo.models import Settings
from disagg.protocol.status import KVPoll

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from disagg.cli.demo.check import ByteCount
    from disagg.runtime.decode_endpoint import DecodeEndpoint

START_TIMEOUT = 600.0
MAX_ROUNDING = 0.1  # error of a quantised pool, relative to the largest logit


@dataclass(frozen=True)
class Check:
    """A comparison: whether it passed, and what it found."""

    passed: bool
    found: str


@dataclass(frozen=True)
class Decoded:
    """A prompt of `tokens` tokens that was moved in `runs` runs and decoded; its comparisons."""

    tokens: int
    bytes: int
    runs: int
    bytes_per_second: float
    bind_seconds: float
    checks: tuple[Check, ...]


def offer(pipe: Connection, settings: Settings) -> None:
    """Computes the prompts and sends each chunk as soon as it is computed."""
    import torch

    from disagg.engines.base import create_engine
    from disagg.runtime.prefill_endpoint import PrefillEndpoint
    from kvpool.allocation.allocator import Allocator
    from kvpool.integrations.transformers import PoolCache

    model, prompt = settings.build()
    pool = settings.pool(model, settings.prefill_page)
    allocator = Allocator(pool)
    with PrefillEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
        pipe.send(("address", endpoint.address))
        for number, tokens in enumerate(settings.prompts):
            room, request = str(number), allocator.new_request()
            cache = PoolCache(pool, allocator, [request])
            pipe.recv()
            with torch.no_grad():
                for chunk in settings.chunks(tokens):
                    last = chunk.stop == tokens
                    first = prefill(model, prompt, cache, [chunk])
                    aux = {"first_token": first} if last else {}
                    after = pool.device.record()
                    endpoint.send(room, request.address(), last=last, aux=aux, after=after)
            if endpoint.wait(room, START_TIMEOUT) is not KVPoll.Success:
                raise RuntimeError(f"the hand-off failed: {endpoint.failure(room)}")
            allocator.free(request)


def prefill(model: Any, prompt: torch.Tensor, cache: Any, chunks: list[range]) -> int:
    """Runs chunks of the prompt; returns the next token."""
    for chunk in chunks:
        ids = prompt[:, chunk.start : chunk.stop]
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())


def decode(
    model: Any, cache: Any, token: int, steps: int, forced: list[int] | None = None
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy steps from `token` (or over the tokens `forced`); returns the tokens and the logits
    `[V]` of each step.
    """
    import torch

    tokens, found = [], []
    for step in range(steps):
        token = token if forced is None else forced[step]
        ids = torch.tensor([[token]], device=model.device)
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        tokens.append(token)
        found.append(logits[0, -1].clone())
    return tokens, found


def transformers_cache(model: Any) -> Any:
    """transformers' own cache for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@dataclass(frozen=True)
class DecodeSide:
    """The decode process: its pool, and another pool for the run in a single process."""

    settings: Settings
    model: Any
    prompt: torch.Tensor
    pool: Any
    single: Any
    new_tokens: int
    console: Console

    def decode(
        self, endpoint: DecodeEndpoint, room: int, watch: Callable[[str, int], None]
    ) -> Decoded:
        """Receives one prompt, decodes from it and compares.

        `watch(room, nbytes)` starts prefill, and returns once the room has succeeded.
        """
        from kvpool.allocation.allocator import Allocator
        from kvpool.render.text import human

        tokens, tell = self.settings.prompts[room], self.console.print
        allocator = Allocator(self.pool)
        request = allocator.new_request()
        allocator.extend(request, tokens, received=True)
        endpoint.receive(str(room), request.address())
        watch(str(room), self.pool.layout.live_bytes(tokens))
        moved = endpoint.metrics(str(room))
        first = int(endpoint.aux(str(room))["first_token"])
        tell(
            f"{tokens:,} tokens: moved {human(moved.bytes_moved)} in {moved.runs:,} runs of "
            f"{human(moved.bytes_per_run)} (adjacent items fused): {human(moved.rate)}/s over "
            f"{self.settings.engine}, bound in {1e3 * moved.bind_seconds:.1f} ms",
            markup=False,
            soft_wrap=True,
        )
        tell(f"decoding {self.new_tokens} tokens, then the whole prompt in a single process ...")
        checks = self.compare(allocator, request, first)
        for check in checks:
            say(self.console, check)
        figures = moved.bytes_moved, moved.runs, moved.rate, moved.bind_seconds
        return Decoded(tokens, *figures, checks)

    def compare(self, allocator: Any, request: Any, first: int) -> tuple[Check, ...]:
        """Decodes from the received state, and compares with runs in this process over a pool of
        the same kind and over transformers' own cache.
        """
        import torch

        from disagg.cli.demo.check import same_as_pool, same_as_transformers
        from kvpool.allocation.allocator import Allocator
        from kvpool.integrations.transformers import PoolCache

        received, chunks = request.address(), self.settings.chunks(request.num_tokens)
        again = PoolCache.new(self.single, Allocator(self.single))
        own = transformers_cache(self.model)
        with torch.no_grad():
            firsts = [prefill(self.model, self.prompt, cache, chunks) for cache in (again, own)]
            there = again.requests[0].address()
            live = same_as_pool(self.pool, received, self.single, there)
            truth = same_as_transformers(self.pool, received, own) if self.settings.exact else None
            cache = PoolCache(self.pool, allocator, [request])
            tokens, logits = decode(self.model, cache, first, self.new_tokens)
            tokens2, logits2 = decode(self.model, again, firsts[0], self.new_tokens)
            forced = None if self.settings.exact else [first, *tokens]
            tokens3, logits3 = decode(self.model, own, firsts[1], self.new_tokens, forced)
        allocator.free(request)
        again.allocator.free(again.requests[0])

        def steps(others: list[torch.Tensor], same: bool, where: str) -> Check:
            equal = sum(map(torch.equal, logits, others))
            words = f"logits of {equal} of {self.new_tokens} decoded steps bit-equal to one process"
            return Check(same and equal == self.new_tokens, f"{words}, {where}")

        def held(count: ByteCount, what: str) -> Check:
            right = f"{count.checked - count.wrong:,} of {count.checked:,}"
            return Check(not count.wrong, f"{right} {what} equal")

        same = first == firsts[0] and tokens == tokens2
        found = [steps(logits2, same, "same pool"), held(live, "live bytes of the pool")]
        if truth is not None:
            found.append(steps(logits3, tokens == tokens3, "transformers' own cache"))
            found.append(held(truth, "bytes that transformers' own cache holds"))
        else:
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, logits3))
            words = f"largest logit error of {self.settings.packing}: {error:.2%} of the largest"
            found.append(Check(error <= MAX_ROUNDING, f"{words} (at most {MAX_ROUNDING:.0%})"))
        return tuple(found)


def say(console: Console, check: Check) -> None:
    """Prints PASS or FAIL, and what was found."""
    from rich.text import Text

    verdict = ("PASS", "green") if check.passed else ("FAIL", "red")
    console.print(Text.assemble(verdict, " ", check.found), soft_wrap=True)
