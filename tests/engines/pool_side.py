"""`PoolCache` as a side of a store: a model of `transformers`, computed over kvpool's own pool. It
begins with what engines have stored, and stores what it computes.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Self

from disagg.connectors.conventions import conventions
from disagg.store import Store
from kvpool import Allocator, PrefixCache
from kvpool.allocation.request import Request
from kvpool.integrations.transformers import PoolCache
from tests.engines.chunks import chunk_keys, whole_chunks
from tests.engines.pair import saved
from tests.engines.stored import Answer
from tests.engines.transformer import PAGE, STEPS, Transformer


class PoolSide:
    """One rank, in this process. `watch`: a folder for what its pool holds of prompts' chunks."""

    name, ranks = f"PoolCache, pages {PAGE}", 1

    def __init__(self, model: Path, url: str, watch: Path) -> None:
        self.watch, self._model = watch, Transformer(model, "float32")
        layout, said = self._model.pool.layout, conventions(self._model.model.config, folder=model)
        self._store = Store(url, layout, conventions=said)
        self._allocator = Allocator(self._model.pool, prefix=PrefixCache(store=self._store))

    def ask(self, prompts: list[list[int]], tokens: int = STEPS) -> list[Answer]:
        """The tokens after prompts, one after the other."""
        return [self._answer(prompt, tokens) for prompt in prompts]

    def recompute(self, prompts: list[list[int]], tokens: int = STEPS) -> list[Answer]:
        """As plain `transformers` computes them."""
        return [Answer(self._model.alone(prompt, tokens), 0) for prompt in prompts]

    def _answer(self, prompt: list[int], tokens: int) -> Answer:
        request = self._allocator.new_request(prompt[:-1])
        cached = request.num_tokens
        if cached:
            self._save("decode", request, prompt)
        cache = PoolCache(self._model.pool, self._allocator, [request])
        answer = self._model.greedy(cache, prompt[cached:], tokens)
        computed = [*prompt, *answer][cached : request.num_tokens]
        self._allocator.store(request, computed)
        if not cached:
            self._save("prefill", request, prompt)
        self._allocator.free(request)
        return Answer(answer, cached)

    def _save(self, side: str, request: Request, prompt: list[int]) -> None:
        """What the model's attention reads: K and V, `[position, head, dim]`."""
        if not (tokens := whole_chunks(len(prompt))):
            return
        pool, where = self._model.pool, self._allocator.locations(request)["kv"][:tokens]
        state = {}
        for layer in range(self._model.model.config.num_hidden_layers):
            k, v = pool.get_kv_buffer(layer, where)
            state |= {f"{layer}/k": k.clone(), f"{layer}/v": v.clone()}
        saved(state, self.watch, f"{side}.{chunk_keys(prompt)[-1].hex()}.0")

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
