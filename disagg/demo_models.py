"""What the demo runs: models small enough to compute in seconds, and otherwise of the family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARED: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 1 << 17,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, **EXPERTS},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 0,
        **EXPERTS,
    },
}


@dataclass(frozen=True)
class Settings:
    """What both processes must agree on, and each side's page size."""

    model: str
    engine: str
    prompt_tokens: int
    chunk_tokens: int
    dtype: str
    seed: int
    threads: int
    prefill_page: int
    decode_page: int

    def chunks(self) -> list[range]:
        """Positions of the prompt, chunk by chunk."""
        size, end = self.chunk_tokens, self.prompt_tokens
        return [range(at, min(at + size, end)) for at in range(0, end, size)]

    def build(self) -> tuple[Any, torch.Tensor]:
        """The model and the prompt `[1, T]`, the same in every process."""
        import torch
        import transformers

        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = transformers.AutoConfig.for_model(self.model, **SHARED, **MODELS[self.model])
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, self.dtype))
        prompt = torch.randint(0, model.config.vocab_size, (1, self.prompt_tokens))
        return model.eval(), prompt

    def pool(self, model: Any, page: int, tokens: int) -> Any:
        """A pool for `tokens` tokens of one request, and three pages more."""
        from kvpool.integrations.transformers import pool_for

        pages = -(-tokens // page) + 4
        return pool_for(model.config, num_pages=pages, page_size=page, dtype=self.dtype)
