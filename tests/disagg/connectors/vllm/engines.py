"""Engines of vLLM as far as the layout reads them, without vLLM: specs, modules, configurations."""

from __future__ import annotations

from types import SimpleNamespace

LATENT, ROPE = 32, 8


def spec(kind: str, block_size: int, **more):
    """A spec of a class of that name, with the fields of vLLM's (v1/kv_cache_interface.py)."""
    fields = {
        "block_size": block_size,
        "dcp_sharded": kind != "MambaSpec",
        "tokens_per_state": 1,
        "kv_quant_mode": SimpleNamespace(name="NONE"),
        "sliding_window": None,
        "extra_retained_tokens": 0,
        "mamba_cache_mode": "none",
    }
    made = type(kind, (SimpleNamespace,), {})(**{**fields, **more})
    if hasattr(made, "head_size") and not hasattr(made, "head_size_v"):
        made.head_size_v = made.head_size
    return made


class Module(SimpleNamespace):
    """An attention module: its backend, and what else it says."""

    def get_attn_backend(self):
        return self.backend


def module(backend: str, **said):
    """A module whose backend has a name, and nothing more."""
    return Module(backend=SimpleNamespace(get_name=lambda: backend), **said)


def config(modules, *, layers=8, kv_heads=2, tp=1, rank=0, latent=LATENT, rope=ROPE, **parallel):
    """The part of a VllmConfig that is read. `rank`: of all ranks of the engine."""
    text = SimpleNamespace(kv_lora_rank=latent, qk_rope_head_dim=rope, index_head_dim=128)
    model = SimpleNamespace(
        model="/models/tiny/",
        hf_text_config=text,
        get_total_num_hidden_layers=lambda: layers,
        get_total_num_kv_heads=lambda: kv_heads,
    )
    held = {
        "tensor_parallel_size": tp,
        "rank": rank,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**{**held, **parallel}),
        compilation_config=SimpleNamespace(static_forward_context=modules),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def caches(blocks: int, groups):
    """A KVCacheConfig of groups of (layer names, spec)."""
    held = [SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(
        num_blocks=blocks, kv_cache_groups=held, transfer_group_ids=range(len(held))
    )


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"
