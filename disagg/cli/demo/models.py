"""The demo's models: real architectures, small enough to run in seconds."""

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
    "pad_token_id": None,
}
# for quantised pools: small weights keep errors small, and rounding cannot change the choice of
# experts or indexed tokens
SMOOTH = {
    "initializer_range": 0.02,
    "num_experts_per_tok": 8,
    "topk_group": 2,
    "index_topk": 1 << 17,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT_ATTENTION = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
DEEPSEEK = {
    "q_lora_rank": 96,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_mtp_layers": 0,
    **LATENT_ATTENTION,
    **EXPERTS,
}
INDEXER = {"index_head_dim": 64, "index_n_heads": 4, "index_topk": 32}
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, **EXPERTS},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, **INDEXER},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": 128,
        "num_experts": 8,
        **EXPERTS,
    },
    "kimi_linear": {
        "linear_num_heads": 8,
        "linear_head_dim": 32,
        "num_local_experts": 8,
        **LATENT_ATTENTION,
        **EXPERTS,
    },
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "head_dim": 128,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 64,
        "layer_types": ["sliding_attention", CSA, HCA, CSA, HCA, CSA],
        "sliding_window": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "n_routed_experts": 8,
        **INDEXER,
        **EXPERTS,
    },
}


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
    seed: int = 0
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
        torch.manual_seed(self.seed)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        numbers = {**SHARED, **MODELS[self.model]}
        if not self.exact:
            numbers.update((name, SMOOTH[name]) for name in SMOOTH if name in numbers)
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
