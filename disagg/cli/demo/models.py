"""The demo's models: real architectures, small enough to run in seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIZES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
"""`shared` by all models; `smooth` for quantised pools: small weights keep errors small, and
rounding cannot change the choice of experts or indexed tokens.
"""
MODELS: dict[str, dict[str, Any]] = SIZES["models"]


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What both processes share: prompts by their lengths, each side's page size (0: the family's
    default), and how many tokens are decoded.
    """

    model: str
    engine: str = "local"
    prompts: tuple[int, ...]
    chunk_tokens: int
    new_tokens: int
    dtype: str
    packing: str
    threads: int = 1
    prefill_page: int = 0
    decode_page: int = 0
    device: str = "cpu"

    @property
    def exact(self) -> bool:
        """Whether the pool stores the model's values without rounding."""
        return self.packing == self.dtype

    def chunks(self, tokens: int) -> list[range]:
        """Positions of a prompt, by chunk."""
        size = self.chunk_tokens
        return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def build(self) -> tuple[Any, torch.Tensor]:
        """The model and the longest prompt `[1, T]`, equal in every process."""
        import torch
        import transformers

        from kvpool.device import get_device

        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        numbers = {**SIZES["shared"], **MODELS[self.model]}
        if not self.exact:
            smooth = SIZES["smooth"]
            numbers.update((name, smooth[name]) for name in smooth if name in numbers)
        config = transformers.AutoConfig.for_model(self.model, **numbers)
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, self.dtype))
        prompt = torch.randint(0, model.config.vocab_size, (1, max(self.prompts)))
        device = get_device(self.device).allocate(1).device
        return model.eval().to(device), prompt.to(device)

    def pool(self, model: Any, page: int) -> Any:
        """A pool for one request of the longest prompt and `new_tokens`, with three spare pages."""
        from kvpool.integrations.transformers import pool_for
        from kvpool.pools.budget import needed_items
        from kvpool.pools.placement import ITEM_COUNTS

        common: dict[str, Any] = {"dtype": self.dtype, "packing": self.packing}
        if page:
            common["page_size"] = page
        few = dict.fromkeys(ITEM_COUNTS, 2)
        probe = pool_for(model.config, **common, **few, device="meta")
        pages = -(-(max(self.prompts) + self.new_tokens) // probe.page_size) + 3
        items = needed_items(probe.layout.spaces, 2, pages, self.chunk_tokens)
        return pool_for(model.config, **common, **items, device=self.device)
