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
from kvpool.prefix.chain import PrefixKey
from tests.engines.chunks import CHUNK, chunk_keys
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

    def ask(self, prompts: list[list[int]], tokens: int = STEPS, tenant: str = "") -> list[Answer]:
        """The tokens after prompts, one after the other."""
        return [self._answer(prompt, tokens, tenant) for prompt in prompts]

    def recompute(self, prompts: list[list[int]], tokens: int = STEPS) -> list[Answer]:
        """As plain `transformers` computes them."""
        return [Answer(self._model.alone(prompt, tokens), 0) for prompt in prompts]

    def _answer(self, prompt: list[int], tokens: int, tenant: str) -> Answer:
        request = self._allocator.new_request(prompt[:-1], salt=tenant)
        cached, keys = request.num_tokens, chunk_keys(prompt, tenant)
        if keys and cached:
            self._save("decode", request, keys)
        cache = PoolCache(self._model.pool, self._allocator, [request])
        answer = self._model.greedy(cache, prompt[cached:], tokens)
        computed = [*prompt, *answer][cached : request.num_tokens]
        self._allocator.store(request, computed)
        if keys and not cached:
            self._save("prefill", request, keys)
        self._allocator.free(request)
        return Answer(answer, cached)

    def _save(self, side: str, request: Request, keys: list[PrefixKey]) -> None:
        """What the model's attention reads of chunks: K and V, `[position, head, dim]`."""
        where = self._allocator.locations(request)["kv"][: len(keys) * CHUNK]
        pool = self._model.pool
        state = {}
        for layer in range(self._model.model.config.num_hidden_layers):
            k, v = pool.get_kv_buffer(layer, where)
            state |= {f"{layer}/k": k.clone(), f"{layer}/v": v.clone()}
        saved(state, self.watch, f"{side}.{keys[-1].hex()}.0")

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
