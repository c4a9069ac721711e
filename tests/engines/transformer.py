"""A real `transformers` model, over kvpool's own pool and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvpool import Allocator
from kvpool.integrations.transformers import pool_for

STEPS, PAGE = 24, 16


class Transformer:
    """A model, and a pool for four requests of it."""

    def __init__(self, place: Path, dtype: str) -> None:
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(place, dtype=getattr(torch, dtype)).eval()
        sizes = {"num_pages": 80, "num_window_pages": 80, "num_slots": 6, "page_size": PAGE}
        self.pool = pool_for(self.model.config, dtype=dtype, **sizes)
        self.allocator = Allocator(self.pool)

    @torch.no_grad()
    def logits(self, cache: Any, tokens: list[int]) -> torch.Tensor:
        """Of the last of `tokens`."""
        asked = torch.tensor([tokens])
        return self.model(asked, past_key_values=cache, use_cache=True).logits[0, -1]

    def greedy(self, cache: Any, tokens: list[int], steps: int = STEPS) -> list[int]:
        """The tokens after `tokens`."""
        found: list[int] = []
        while len(found) < steps:
            found.append(int(self.logits(cache, tokens if not found else found[-1:]).argmax()))
        return found

    def alone(self, prompt: list[int], steps: int = STEPS) -> list[int]:
        """Tokens of plain transformers. The last of the prompt is computed in a step of its own."""
        cache = DynamicCache(config=self.model.config)
        self.logits(cache, prompt[:-1])
        return self.greedy(cache, prompt[-1:], steps)
