"""Prefill's side of the demo, in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from disagg.cli.demo.models import DemoSettings
from disagg.protocol.status import KVPoll

if TYPE_CHECKING:
    import torch

START_TIMEOUT = 600.0


class PrefillSide:
    """Called by the other process; one demo after the other."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def open(self, settings: DemoSettings) -> str:
        """Builds the model, a pool and an endpoint, whose address it returns."""
        from disagg.engines.base import create_engine
        from disagg.runtime.prefill_endpoint import PrefillEndpoint
        from kvpool.allocation.allocator import Allocator

        self._stack.close()
        self._settings = settings
        self._model, self._prompt = settings.build()
        pool = settings.pool(self._model, settings.prefill_page)
        self._pool, self._allocator = pool, Allocator(pool)
        engine = create_engine(settings.engine)
        self._endpoint = self._stack.enter_context(PrefillEndpoint(pool.layout, engine))
        return self._endpoint.address

    def send(self, number: int) -> None:
        """Computes a prompt, and sends each chunk as soon as it is computed."""
        import torch

        from kvpool.integrations.transformers import PoolCache

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


def prefill(model: Any, prompt: torch.Tensor, cache: Any, chunks: list[range]) -> int:
    """Runs chunks of the prompt; returns the next token."""
    for chunk in chunks:
        ids = prompt[:, chunk.start : chunk.stop]
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())
